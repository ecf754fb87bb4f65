"""A checkpoint's keyrings as far as they can be judged without a key: what each says against where it stands.

What a keyring opens is the security package's to find out; that it is one, of this checkpoint, of this
number, and goes on from the one before it, are plain facts of the format. `docs/format.md`, clause 14.3.
"""

from __future__ import annotations

import re
from typing import Final

from strongroom import canonical, layout
from strongroom.canonical import Bounds
from strongroom.digest import Digest, sha256_of
from strongroom.errors import IntegrityError, UnsupportedFormatError
from strongroom.findings import Findings
from strongroom.manifest import FORMAT, MAX_KEYRING_BYTES, Commit
from strongroom.stores.base import Store

__all__ = ["check_keyrings"]

_KEYRING_BOUNDS: Final = Bounds(length_bytes=MAX_KEYRING_BYTES, depth=4, items=8_000_000)
"""Room for the keys of a million files."""

_FORMAT = re.compile(r"[0-9]{1,4}\.[0-9]{1,4}")

_MAX_LOOKS: Final = 20
"""How often the folder is looked at anew because a rotation removed what was listed."""


def check_keyrings(store: Store, commit: Commit, findings: Findings) -> bool:
    """Whether some keyring may open: hold each against the checkpoint, and the first against ``COMMIT``.

    A rotation adds generations, and may remove the oldest while this looks.
    """
    folder = f"{commit.name.folder}/{layout.KEYRINGS}"
    for look in range(1, _MAX_LOOKS + 1):
        found = Findings()
        names = store.list_names(folder)
        for name in names:
            if layout.parse_keyring_name(name) is None:
                found.add(f"{folder}/{name}", "unexpected", "it is no keyring")
        generations = sorted(filter(None, map(layout.parse_keyring_name, names)))
        whole = _whole_keyrings(store, commit, generations, found)
        # A generation that was listed and is gone: that is no damage.
        if look == _MAX_LOOKS or not any(problem.kind == "missing" for problem in found.problems):
            break
    findings.problems += found.problems
    if not generations:
        raise IntegrityError("the checkpoint is sealed, and no keyring is there")
    return whole > 0


def _whole_keyrings(store: Store, commit: Commit, generations: list[int], findings: Findings) -> int:
    """How many of the generations are keyrings of this checkpoint, as far as can be told without a key."""
    whole = 0
    before: tuple[int, Digest] | None = None
    for generation in generations:
        key = layout.keyring_key(commit.name, generation)
        previous, before = before, None
        with findings.about(key, absent="it was listed, and cannot be read"):
            data = store.read(key, limit_bytes=MAX_KEYRING_BYTES)
            digest = sha256_of(data)
            before = generation, digest
            if generation == 1 and commit.keyring is not None and not digest.matches(commit.keyring):
                raise IntegrityError(f"its digest is {digest}, and COMMIT pins {commit.keyring}")
            follows = previous[1] if previous is not None and previous[0] == generation - 1 else None
            _check_keyring(data, commit, generation, follows)
            whole += 1
    return whole


def _check_keyring(data: bytes, commit: Commit, generation: int, follows: Digest | None) -> None:
    """Hold what a keyring says of itself against where it stands.

    Args:
        follows: the digest of the generation before it; None: that is gone, or could not be read.
    """
    what = f"keyring {generation}"
    members = canonical.check_self_digest(canonical.decode(data, what, _KEYRING_BOUNDS), what)
    version = members.get("format")
    if isinstance(version, str) and _FORMAT.fullmatch(version) and version != FORMAT:
        raise UnsupportedFormatError(f"is in format {version}; this release reads {FORMAT}")
    name = commit.name
    expected = {
        "attempt": name.attempt,
        "format": FORMAT,
        "generation": generation,
        "kind": "keyring",
        "launch": name.launch,
        "run": commit.run,
        "step": name.step,
    }
    if generation == 1:
        expected["previous"] = None
    elif follows is not None:
        expected["previous"] = str(follows)
    for member, value in expected.items():
        stated = members.get(member, "nothing")
        if type(stated) is not type(value) or stated != value:
            raise IntegrityError(f"says that its {member} is {stated!r:.80}, and {value!r} was expected")
