"""Secrets in what people record: found by the name or by the form of a value, and replaced.

Pure. It works on nodes (`strongroom.values`), so that it finds a text whatever container, path or
registered type holds it. It is a net and no proof: what looks like nothing known passes, so
`docs/how-to/provenance.md` says what not to record.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Final

from strongroom import canonical

if TYPE_CHECKING:
    # Of types alone: reasons are looked through where nobody waits for torch.
    from strongroom.values import Node

    _Write = Callable[["Scrubber", Node, Node, str], Node]

__all__ = ["SCRUBBED", "Scrubber", "secret_values", "without_userinfo"]

SCRUBBED: Final = "<scrubbed>"

_LEAST_SECRET: Final = 8
"""Characters of a variable's value that is looked for elsewhere; a shorter one occurs by chance."""

_PLACES: Final = frozenset({"DIR", "DIRECTORY", "FILE", "HOME", "NAME", "PATH", "SOCK", "URL"})
"""What a variable's name ends in that says where a secret is, and not what."""
_FOLDERS: Final = frozenset({"PWD", "OLDPWD"})
"""Variables in which a shell keeps working directories."""
_SETTINGS: Final = frozenset(
    {"algorithm", "backend", "engine", "format", "hasher", "hint", "kind", "manager", "mode", "namespace",
     "policy", "prompt", "provider", "region", "rotation", "source", "store", "type"}
)  # fmt: skip
"""What a variable's name ends in where plain words say how secrets are kept."""
_NO_SECRETS: Final = frozenset({"disabled", "optional", "required", "undefined", "unlocked"})

_WORDS: Final = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")

_ALWAYS: Final = frozenset(
    {"password", "passwd", "passphrase", "pwd", "secret", "secrets", "credential", "credentials", "apikey",
     "apikeys", "authorization", "cookie", "bearer", "accesskey", "privatekey", "secretkey", "netrc"}
)  # fmt: skip
_ALWAYS_WITHIN: Final = ("password", "passphrase", "secret", "credential")
"""Also as a part of a longer word, such as ``dbpassword``."""
_SECRET_KEYS: Final = frozenset(
    {"access", "account", "api", "app", "auth", "comet", "encryption", "host", "master", "neptune", "private",
     "secret", "service", "shared", "signing", "ssh", "storage", "wandb"}
)  # fmt: skip
"""What before ``key`` makes a secret of it."""
_SECRET_TOKENS: Final = frozenset(
    {"access", "api", "auth", "bearer", "bot", "csrf", "gh", "github", "gitlab", "hf", "hub", "id", "oauth",
     "personal", "refresh", "sas", "secret", "security", "service", "session"}
)  # fmt: skip
_TEXT_TOKENS: Final = frozenset(
    {"audio", "begin", "bos", "class", "cls", "decoder", "end", "eoi", "eos", "fim", "image", "mask", "pad",
     "prefix", "sep", "soi", "special", "start", "stop", "suffix", "unk", "video"}
)  # fmt: skip
"""What before ``token`` makes a piece of a vocabulary of it."""
_NUMERIC_TOO: Final = frozenset({"password", "passwd", "passphrase", "pwd", "pin", "secret"})
"""Names of which even a number is a secret; of others (``secret_size``) it is a number."""

_PASSES: Final = frozenset(
    {"all", "backward", "by", "compiler", "data", "each", "eval", "final", "first", "forward", "full",
     "fusion", "high", "inference", "last", "low", "max", "min", "multi", "n", "next", "num", "one", "per",
     "prefill", "prev", "previous", "render", "second", "single", "test", "third", "train", "training", "two",
     "validation", "warmup"}
)  # fmt: skip
"""What before ``pass`` makes a round over something of it."""
_OUTCOMES: Final = frozenset({"fail", "failed", "false", "none", "null", "passed", "true"})
"""What stands under ``pass`` where it tells how a test went."""

_PLAIN_WORDS: Final = re.compile(r"[A-Za-z]{1,16}(?:[_./ -][A-Za-z]{1,16}){0,5}")
"""What stands as the ``key`` of a record or a cache, and is no secret."""

_FORMS: Final = re.compile(
    r"""
    -----BEGIN\ [A-Z0-9 ]*PRIVATE\ KEY[A-Z0-9 ]*-----[\s\S]*?
        (?:-----END\ [A-Z0-9 ]*PRIVATE\ KEY[A-Z0-9 ]*-----|\Z)
    | AGE-SECRET-KEY-1[0-9A-Z]{40,}
    | (?<![A-Za-z0-9])(?:
          (?:AKIA|ASIA|ABIA|ACCA)[A-Z2-7]{16}(?![A-Za-z0-9])     # AWS access key ids
        | eyJ[A-Za-z0-9_-]{8,1024}\.[A-Za-z0-9_-]{8,}(?:\.[A-Za-z0-9_-]*)?   # JSON Web Tokens
        | gh[pousr]_[A-Za-z0-9]{20,} | github_pat_[A-Za-z0-9_]{20,} | glpat-[A-Za-z0-9_-]{16,}
        | hf_[A-Za-z0-9]{20,} | api_org_[A-Za-z0-9]{20,} | wandb_v[0-9]+_[A-Za-z0-9_]{20,}
        | sk-[A-Za-z0-9_-]{20,} | [sr]k_(?:live|test)_[A-Za-z0-9]{16,} | xox[abeoprs]-[A-Za-z0-9-]{10,}
        | AIza[A-Za-z0-9_-]{35} | ya29\.[A-Za-z0-9_-]{20,} | npm_[A-Za-z0-9]{30,} | pypi-[A-Za-z0-9_-]{50,}
        | hv[sbr]\.[A-Za-z0-9_-]{20,} | dapi[0-9a-f]{32} | nvapi-[A-Za-z0-9_-]{20,}
        | (?i:bearer)\ +[A-Za-z0-9+/=._~-]{8,} | (?i:basic)\ +[A-Za-z0-9+/]{16,}={0,2}
    )
    """,
    re.VERBOSE,
)
"""Forms that their issuers document, so that they can be found in places like this."""

_USERINFO: Final = re.compile(
    r"""
    (?<=://)(?:
        # With a password, which may hold what should have been escaped: up to the last "@", but not past
        # the next of several addresses. Ports, drives and IPv6 addresses are no passwords.
        (?<!file://)(?!\[)[^/\s:'"<>]*:(?![0-9]{1,5}[/?\#])
            (?:(?![,;|&][A-Za-z][A-Za-z0-9+.-]*://)[^\s'"<>]){0,512}@
      | [^/\s'"<>]+@
    )
    """,
    re.VERBOSE,
)

_ASSIGNED: Final = re.compile(
    r"""(?<![A-Za-z0-9_.-])(?P<name>-{0,2}[A-Za-z_][A-Za-z0-9_.-]{0,200})
        (?P<between>["']?\s{0,4}(?:=|:(?!//))\s{0,4}["']?)(?P<value>[^\s"'&,;<>]{3,})""",
    re.VERBOSE,
)

_SIGNED_QUERY: Final = re.compile(
    r"(?i)(?<=[?&])((?:sig|signature|x-(?:amz|goog)-(?:signature|credential|security-token))=)[^&\s]+"
)
"""What makes a link to a bucket a key to it."""

_NUMBER: Final = re.compile(r"[-+]?[0-9][0-9_.eE+-]*")

_FLAG: Final = re.compile(r"--?(?P<name>[A-Za-z][A-Za-z0-9_.-]{0,60})")


def secret_values(environment: Mapping[str, str]) -> frozenset[str]:
    """Values of variables whose names say that they are secret: these may stand nowhere else."""
    return frozenset(
        value.strip()
        for name, value in environment.items()
        if len(value.strip()) >= _LEAST_SECRET
        and name not in _FOLDERS
        and name.rpartition("_")[2] not in _PLACES
        and _secrecy(name) is not None
        and (not _PLAIN_WORDS.fullmatch(value.strip()) or _may_be_words(name, value.strip()))
    )


def without_userinfo(url: str) -> str:
    """A repository's address without who fetches it: ``https://user:token@host/path``, ``git@host:path``."""
    if "://" in url:
        bare = _USERINFO.sub("", url)
        return re.split(r"[?#]", bare, maxsplit=1)[0]
    place, colon, path = url.partition(":")
    return f"{place.rpartition('@')[2]}{colon}{path}" if colon and "/" not in place else url


class Scrubber:
    """Replaces what looks like a secret in the documents of one checkpoint.

    Args:
        known: secrets that are known by value.

    Attributes:
        found: where something was replaced, in the order of the documents.
    """

    def __init__(self, known: Collection[str] = ()) -> None:
        by_length = sorted(known, key=len, reverse=True)
        self._known = [secret for secret in by_length if not _PLAIN_WORDS.fullmatch(secret)]
        # Plain words only as words: "training" is no secret within "pretraining".
        self._words = [secret for secret in by_length if _PLAIN_WORDS.fullmatch(secret)]
        self._as_words = re.compile(
            rf"(?<![A-Za-z0-9])(?:{'|'.join(map(re.escape, self._words))})(?![A-Za-z0-9])"
        )
        self.found: list[str] = []

    def node(self, node: Node, where: str) -> Node:
        """A document without what looks like a secret; itself where nothing does.

        Args:
            where: the path of the document, for `found`.
        """
        if type(node) is str:
            return self.text(node, where)
        if type(node) is list:
            return self._items(node, where)
        if type(node) is not dict:
            return node
        tag, payload = node.get("$"), node.get("v")
        write = _BY_TAG.get(tag) if type(tag) is str else None
        return node if write is None else write(self, node, payload, where)

    def text(self, text: str, where: str) -> str:
        """A text, with what looks like a secret in it replaced."""
        clean = text
        for secret in self._known:
            clean = clean.replace(secret, SCRUBBED)
        if self._words:
            clean = self._as_words.sub(SCRUBBED, clean)
        clean = _FORMS.sub(SCRUBBED, clean)
        clean = _USERINFO.sub(f"{SCRUBBED}@", clean)
        clean = _SIGNED_QUERY.sub(rf"\g<1>{SCRUBBED}", clean)
        clean = _ASSIGNED.sub(_assigned, clean)
        if clean != text:
            self.found.append(where)
        return clean

    def _named(self, name: str, node: Node, where: str) -> Node:
        """What stands under a name, which may say that it is secret."""
        secrecy = _secrecy(name)
        if secrecy is not None and _is_held_secret(secrecy, name, node):
            self.found.append(where)
            return SCRUBBED
        return self.node(node, where)

    def _items(self, nodes: list[Node], where: str) -> list[Node]:
        found = []
        is_next_secret = False
        for number, item in enumerate(nodes):
            place = f"{where}[{number}]"
            if is_next_secret and type(item) is str and not item.startswith("-"):
                self.found.append(place)
                found.append(SCRUBBED)
                is_next_secret = False
                continue
            # As in a list of arguments: ["--api-key", "..."].
            flag = _FLAG.fullmatch(item) if type(item) is str else None
            is_next_secret = flag is not None and _secrecy(flag["name"]) is not None
            found.append(self.node(item, place))
        return found

    def _pairs(self, pairs: list[Node], where: str) -> list[Node]:
        found: list[Node] = []
        taken: set[str] = set()
        for pair in pairs:
            if type(pair) is not list or len(pair) != 2:
                found.append(pair)
                continue
            key, item = pair
            # A password that is a word names members too, such as "platform", by which they are found.
            is_name = type(key) is str and key.isidentifier() and key in self._words
            clean = key if is_name else self.node(key, f"{where} (a key)")
            if type(key) is not str or type(clean) is not str:
                found.append([clean, self.node(item, f"{where}[...]")])
                continue
            number = 2
            name = clean
            while name in taken:
                # Two keys that are one now would be refused by whoever reads them.
                name, number = f"{clean} {number}", number + 1
            taken.add(name)
            found.append([name, self._named(key, item, f"{where}[{name!r}]")])
        return found

    def _whole(self, node: Node, payload: Node, where: str) -> Node:
        if type(payload) is list:
            return {"$": node["$"], "v": self._items(payload, where)}
        return node

    def _set(self, node: Node, payload: Node, where: str) -> Node:
        if type(payload) is not list:
            return node
        clean = [self.node(item, where) for item in payload]
        by_bytes = {canonical.encode(item): item for item in clean}
        return {"$": node["$"], "v": [by_bytes[key] for key in sorted(by_bytes)]}

    def _mapping(self, node: Node, payload: Node, where: str) -> Node:
        if type(payload) is not list:
            return node
        return {"$": node["$"], "v": self._pairs(payload, where)}

    def _headed(self, node: Node, payload: Node, where: str) -> Node:
        """A container whose payload begins with something that is no item."""
        if type(payload) is not list or not payload:
            return node
        head, *rest = payload
        if node["$"] == "ordered_dict" and type(head) is list:
            head = self._pairs(head, where)
        items = self._items(rest, where) if node["$"] == "deque" else self._pairs(rest, where)
        return {"$": node["$"], "v": [head, *items]}

    def _object(self, node: Node, payload: Node, where: str) -> Node:
        if type(payload) is not list or len(payload) != 2:
            return node
        return {"$": "object", "v": [payload[0], self.node(payload[1], where)]}

    def _atom(self, node: Node, payload: Node, where: str) -> Node:
        """A value that is spelled as text: replaced whole, since a part of it would not be read back."""
        before = len(self.found)
        if type(payload) is not str or self.text(payload, where) == payload:
            return node
        del self.found[before:]
        self.found.append(where)
        return SCRUBBED

    def _bytes(self, node: Node, payload: Node, where: str) -> Node:
        try:
            raw = base64.b64decode(payload, validate=True)
        except (binascii.Error, TypeError, ValueError):
            return node
        before = len(self.found)
        text = raw.decode("utf-8", "surrogateescape")
        if self.text(text, where) == text:
            return node
        del self.found[before:]
        self.found.append(where)
        return SCRUBBED


_BY_TAG: Final[dict[str, _Write]] = {
    "dict": Scrubber._mapping,
    "counter": Scrubber._mapping,
    "namespace": Scrubber._mapping,
    "argparse_namespace": Scrubber._mapping,
    "ordered_dict": Scrubber._headed,
    "defaultdict": Scrubber._headed,
    "deque": Scrubber._headed,
    "tuple": Scrubber._whole,
    "set": Scrubber._set,
    "frozenset": Scrubber._set,
    "object": Scrubber._object,
    "posix_path": Scrubber._atom,
    "windows_path": Scrubber._atom,
    "pure_posix_path": Scrubber._atom,
    "pure_windows_path": Scrubber._atom,
    "numpy.str": Scrubber._atom,
    "numpy.bytes": Scrubber._bytes,
    "bytes": Scrubber._bytes,
    "bytearray": Scrubber._bytes,
    "str": Scrubber._bytes,
}


def _assigned(found: re.Match[str]) -> str:
    """``name=value`` within a text."""
    name, value = found["name"].lstrip("-"), found["value"]
    if value.startswith(SCRUBBED) or _NUMBER.fullmatch(value):
        return found[0]
    secrecy = _secrecy(name)
    if secrecy == "pass" and not found["name"].startswith("-"):
        secrecy = "key"  # In a sentence, "first pass: done" is no password.
    if secrecy is None or not _is_held_secret(secrecy, name, value):
        return found[0]
    return f"{found['name']}{found['between']}{SCRUBBED}"


def _secrecy(name: str) -> str | None:
    """What a name says of its value: ``"always"`` a secret, or maybe as of a ``"key"``; None: nothing."""
    words = [word.lower() for word in _WORDS.findall(name[:200])]
    if not words:
        return None
    if not _ALWAYS.isdisjoint(words) or any(part in word for part in _ALWAYS_WITHIN for word in words):
        return "always"
    before = words[-2] if len(words) > 1 else ""
    last = words[-1]
    if last == "pass":
        return None if before in _PASSES else "pass"
    if last in ("key", "keys"):
        return "always" if before in _SECRET_KEYS else "key" if last == "key" else None
    if last in ("token", "tokens"):
        if before in _SECRET_TOKENS:
            return "always"
        return "token" if last == "token" and before not in _TEXT_TOKENS else None
    return "token" if last.endswith("token") or last in ("auth", "jwt", "pat") else None


def _may_be_words(name: str, value: str) -> bool:
    """Whether a variable's plain words are a secret: of a password or passphrase they may be."""
    words = [word.lower() for word in _WORDS.findall(name[:200])]
    says = words[-1] == "pass" or any(
        word in ("passwd", "pwd") or "password" in word or "passphrase" in word or "secret" in word
        for word in words
    )
    return says and words[-1] not in _SETTINGS and value.lower() not in _NO_SECRETS


def _is_held_secret(secrecy: str, name: str, node: Node) -> bool:
    """Whether what stands under a secret's name is one: settings about a secret are none."""
    if node is None or type(node) is bool or node in ("", SCRUBBED):
        return False
    if type(node) is int or (type(node) is dict and node.get("$") in ("int", "float")):
        words = _WORDS.findall(name)
        return secrecy == "always" and bool(words) and words[-1].lower() in _NUMERIC_TOO
    if secrecy == "always":
        # An empty container holds nothing that could be secret.
        return (node["v"] if type(node) is dict and "v" in node else node) not in ("", [])
    if type(node) is not str:
        return type(node) is dict and node.get("$") in (
            "bytes",
            "bytearray",
            "str",
            "numpy.str",
            "numpy.bytes",
        )
    if secrecy == "pass":
        return len(node) > 3 and node.lower() not in _OUTCOMES
    if secrecy == "key":
        return _PLAIN_WORDS.fullmatch(node) is None
    # Marks such as "<s>" and "[CLS]" are pieces of a vocabulary.
    return len(node) > 3 and not (node[0] in "<[" and node[-1] in ">]")
