"""Keys that seal, and count what they are asked, as a key service would be; and figures of these counts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from strongroom_bench.figure import Figure
from strongroom_security import Audit, Seal, SecurityPolicy, Sign
from strongroom_security.recipients.file import FileKey, create_key_file
from strongroom_security.signers.file import FileSigner
from strongroom_security.signers.generating import generate_key

if TYPE_CHECKING:
    from strongroom_security.fields import Context
    from strongroom_security.secret import Secret

__all__ = [
    "CountedKey",
    "close_log",
    "create_keys",
    "key_calls",
    "protecting_policy",
    "read_keys",
    "read_signer",
]

_SIGNER: Final = "signer.pem"

_WITHIN_S: Final = 60.0

_RECIPIENTS: Final = 2
"""As a policy should name: where there is one key only, every checkpoint is lost with it."""


class CountedKey:
    """A recipient and identity whose key came from a file.

    Attributes:
        wraps, unwraps: how often it was asked for each.
    """

    def __init__(self, key: FileKey) -> None:
        self._key = key
        self.id: Final = key.id
        self.kind: Final = key.kind
        self.uri: Final = key.uri
        self.wraps = 0
        self.unwraps = 0

    def wrap(self, key: Secret, context: Context, *, within_s: float) -> bytes:
        self.wraps += 1
        return self._key.wrap(key, context, within_s=within_s)

    def unwrap(self, wrapped: bytes, context: Context, *, within_s: float) -> Secret:
        self.unwraps += 1
        return self._key.unwrap(wrapped, context, within_s=within_s)


def create_keys(folder: Path) -> None:
    """Draw new keys, for `read_keys` in this process and others."""
    folder.mkdir()
    for path in _paths(folder):
        create_key_file(path)
    generate_key(folder / _SIGNER)


def read_signer(folder: Path) -> FileSigner:
    """The signing key that lies in a folder."""
    return FileSigner.read(folder / _SIGNER, uri=f"file:{_SIGNER}")


def read_keys(folder: Path) -> list[CountedKey]:
    """What `create_keys` drew; nothing is counted yet."""
    return [CountedKey(FileKey.read(path)) for path in _paths(folder)]


def _paths(folder: Path) -> list[Path]:
    return [folder / f"{number}.key" for number in range(_RECIPIENTS)]


def protecting_policy(keys: Iterable[CountedKey], signer: FileSigner, log: Path) -> SecurityPolicy:
    """Seals to these keys, any one of which opens; signs by the signer, and demands its signature; audits.

    Args:
        log: a folder for the audit log, and for what waits to go there.
    """
    return SecurityPolicy(
        seal=Seal(recipients=list(keys)),
        sign=Sign(key=signer),
        audit=Audit(sink=f"dir:{log / 'sink'}", spool=log / "spool"),
    )


def close_log(policy: SecurityPolicy) -> None:
    """See everything into the log, whose folder may go then."""
    policy.auditor.close(within_s=_WITHIN_S)


def key_calls(
    wraps: Sequence[int],
    unwraps: int,
    *,
    saves: int,
    restores: int,
    ranks: int = 1,
    setting: str = "",
) -> list[Figure]:
    """How often keys were asked, by every process together, for so many saves and restores.

    Args:
        wraps: of each recipient.
        unwraps: of all of them.
    """
    where = "" if ranks == 1 else f", {ranks} ranks"
    return [
        Figure(
            figure=f"calls to wrap a key, a recipient and sealed save{where}",
            value=max(wraps) / saves,
            unit="calls",
            bar=1.0,
            peers={"of all recipients calls": sum(wraps), "for them all saves": saves},
            runs=saves,
            setting=setting,
            world_size=ranks,
            # Fewer would say that something was not sealed to everybody.
            is_sound=set(wraps) == {saves},
        ),
        Figure(
            figure=f"calls to unwrap a key, a sealed restore{where}",
            value=unwraps / restores,
            unit="calls",
            bar=1.0,
            peers={"of all recipients calls": unwraps, "for them all restores": restores},
            runs=restores,
            setting=setting,
            world_size=ranks,
            is_sound=unwraps == restores,
        ),
    ]
