"""URIs that name a key in a PKCS #11 token (RFC 7512), and no more than name it.

A URI comes from a policy that many machines share. It therefore may not choose which library is loaded
into the process, nor tell the PIN; it may say in which file the PIN is.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Literal
from urllib.parse import unquote, unquote_to_bytes

from strongroom.errors import ConfigError

__all__ = ["KeyKind", "TokenKeyUri"]

KeyKind = Literal["secret-key", "private"]
"""What RFC 7512 (2.3) calls the type of a key's object."""

_KINDS: Final[dict[KeyKind, str]] = {"secret-key": "an AES key", "private": "a private key"}
_TOKEN: Final = ("manufacturer", "model", "serial", "token")
_KEY: Final = ("id", "object")
_ATTRIBUTE: Final = re.compile(
    r"(?P<name>[a-z-]+)=(?P<value>(?:[A-Za-z0-9\-._~\[\]:@!$'()*+,=&/|]|%[0-9A-Fa-f]{2})+)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenKeyUri:
    """What a URI says.

    Attributes:
        token: what the token must be like: its label as ``token``, ``serial``, ``manufacturer``, ``model``.
        label: the key's label (``object``), None: any.
        key_id: the key's ``CKA_ID`` (``id``), None: any.
        pin_file: where the PIN is (``pin-source``), None: the URI does not say.
    """

    token: tuple[tuple[str, str], ...]
    label: str | None
    key_id: bytes | None
    pin_file: str | None

    @classmethod
    def parse(cls, text: str, *, kind: KeyKind = "secret-key") -> TokenKeyUri:
        """Read what stands behind ``pkcs11:``.

        Args:
            text: that.
            kind: what is to be named, and the only ``type`` that the URI may say.

        Raises:
            ConfigError: it is no such URI, names no single key, chooses the module, or tells the PIN.
        """
        if "pin-value" in text:
            # The PIN must not stand in this error, so the URI does not either.
            raise ConfigError(
                "a pkcs11: URI tells the PIN (pin-value); change the PIN, and put the new one into a file "
                "for this user alone"
            )
        uri = f"pkcs11:{text}"
        path, _, query = text.partition("?")
        found = _attributes(path, ";", uri)
        unknown = sorted(set(found) - {*_TOKEN, *_KEY, "type"})
        if unknown:
            raise ConfigError(
                f"{uri!r}: {unknown[0]!r} is not used here; expected token or serial, and object or id"
            )
        if found.get("type", kind) != kind:
            raise ConfigError(f"{uri!r} names a {found['type']}; expected {_KINDS[kind]}, type={kind}")
        if not {"token", "serial"} & set(found) or not set(_KEY) & set(found):
            raise ConfigError(
                f"{uri!r} names no key; expected pkcs11:token=LABEL;object=LABEL (or serial=, id=)"
            )
        return cls(
            token=tuple((name, _text(found[name], uri)) for name in _TOKEN if name in found),
            label=_text(found["object"], uri) if "object" in found else None,
            key_id=unquote_to_bytes(found["id"]) if "id" in found else None,
            pin_file=_pin_file(query, uri),
        )

    def names(self) -> tuple[bytes, ...]:
        """What names the key: the same wherever the URI is read, and however it is spelt."""
        pairs = [(name, value.encode()) for name, value in self.token]
        if self.label is not None:
            pairs.append(("object", self.label.encode()))
        if self.key_id is not None:
            pairs.append(("id", self.key_id))
        return tuple(part for name, value in pairs for part in (name.encode(), value))


def _attributes(text: str, separator: str, uri: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for part in text.split(separator) if text else ():
        match = _ATTRIBUTE.fullmatch(part)
        if match is None or match["name"] in found:
            raise ConfigError(f"{uri!r} is not a PKCS #11 URI (RFC 7512): {part!r}")
        found[match["name"]] = match["value"]
    return found


def _text(value: str, uri: str) -> str:
    try:
        return unquote(value, errors="strict")
    except UnicodeDecodeError:
        raise ConfigError(f"{uri!r}: {value!r} is not UTF-8 (RFC 7512, 2.3)") from None


def _pin_file(query: str, uri: str) -> str | None:
    found = _attributes(query, "&", uri)
    for name in ("module-path", "module-name"):
        if name in found:
            raise ConfigError(
                f"{uri!r} chooses the library that is loaded into this process; take {name} out, and name "
                "the module on the machine itself"
            )
    unknown = sorted(set(found) - {"pin-source"})
    if unknown:
        raise ConfigError(f"{uri!r}: {unknown[0]!r} is not used here")
    if "pin-source" not in found:
        return None
    source = _text(found["pin-source"], uri).removeprefix("file:")
    if source.startswith("///"):
        source = source[2:]
    if not source.startswith("/") or source.startswith("//"):
        raise ConfigError(f"{uri!r}: pin-source must be a file, file:/PATH; no command is run for a PIN")
    return source
