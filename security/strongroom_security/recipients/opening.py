"""From a policy's text to a recipient or an identity. The only place that knows all kinds.

=====================  ==============================================================
``file:PATH``          a key file; relative paths are relative to the policy's folder
``hpke:PATH``          a public key (can only seal) or a private key (both)
``aws-kms:KEY``        an AWS KMS key's ARN or alias
``openbao:MOUNT/KEY``  a key of OpenBao's or Vault's transit engine
``pkcs11:URI``         a key in a PKCS #11 token (RFC 7512)
=====================  ==============================================================
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from strongroom.errors import ConfigError
from strongroom_security.recipients.base import Identity, Recipient

__all__ = ["open_identity", "open_recipient"]

_KINDS: Final = ("file:PATH", "hpke:PATH", "aws-kms:ARN", "openbao:MOUNT/KEY", "pkcs11:URI")


def open_recipient(text: str, *, base: Path) -> Recipient:
    """The recipient that a policy names; often an `Identity` as well.

    Args:
        text: as in the policy.
        base: what relative paths are relative to.

    Raises:
        ConfigError: no such kind, no such key, or an extra that is not installed.
    """
    return _open(text, base)


def open_identity(text: str, *, base: Path) -> Identity:
    """The identity that a policy names. As `open_recipient`.

    Raises:
        ConfigError: also where what is named can only seal.
    """
    found = _open(text, base)
    if not isinstance(found, Identity):
        raise ConfigError(f"{text} is a public key, which can seal and never open; name the private key")
    return found


def _open(text: str, base: Path) -> Recipient:
    kind, colon, rest = text.partition(":")
    if not colon or not rest:
        raise _unknown(text)
    # Each is imported where it is asked for: a key service's library takes long to import, if it is there.
    if kind == "file":
        from strongroom_security.recipients.file import FileKey

        return FileKey.read(base / rest, uri=text)
    if kind == "hpke":
        from strongroom_security.recipients.hpke import read_key

        return read_key(base / rest, uri=text)
    if kind == "aws-kms":
        from strongroom_security.recipients.aws_kms import AwsKms

        return AwsKms.of(rest)
    if kind == "openbao":
        from strongroom_security.recipients.openbao import OpenBao

        return OpenBao.of(rest)
    if kind == "pkcs11":
        from strongroom_security.recipients.pkcs11 import Pkcs11

        return Pkcs11.of(rest)
    raise _unknown(text)


def _unknown(text: str) -> ConfigError:
    return ConfigError(f"{text[:100]!r} names no recipient or identity; expected one of {', '.join(_KINDS)}")
