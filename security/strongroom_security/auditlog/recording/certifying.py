"""A long-lived signer's word on a writer's key: asked for once a writer, beside whatever the program does."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

from strongroom.errors import StrongroomError
from strongroom_security.auditlog.format.lines import Certificate
from strongroom_security.auditlog.format.segments import WriterKey
from strongroom_security.signers.base import Signer, check_signature, sign_checked
from strongroom_security.signers.file import FileSigner

__all__ = ["Certifying", "certify"]

_WITHIN_S: Final = 30.0
_PAUSE_S: Final = 5.0
"""Between tries where the keeper of the key is out of reach; each is longer than the one before, up to:"""
_LONGEST_PAUSE_S: Final = 300.0


def certify(signer: Signer, key: WriterKey, *, within_s: float = _WITHIN_S) -> Certificate:
    """Ask for it.

    Raises:
        NoKeyError, KeyServiceError, ConfigError: as `sign_checked`.
    """
    message = key.certified()
    if isinstance(signer, FileSigner):
        # Nothing waits for a key in memory, and so no thread is needed to leave it behind.
        signature = signer.sign(message, within_s=within_s)
        check_signature(signer.public_key, message, signature, who=signer.uri)
    else:
        signature = sign_checked(signer, message, within_s=within_s)
    return Certificate(key_id=signer.public_key.id, signature=signature)


class Certifying:
    """The certificate of one writer: there, on its way, or not to be had for now.

    Args:
        signer: whose word it is; None: nobody's, and there is nothing to wait for.
        then: called on the thread that asked, whenever an answer has come.
        wait: waits for so many seconds, and says whether to give up.
    """

    def __init__(
        self,
        signer: Signer | None,
        key: WriterKey,
        *,
        then: Callable[[], None],
        wait: Callable[[float], bool],
    ) -> None:
        self.certificate: Certificate | None = None
        self.error: StrongroomError | None = None
        self.is_pointless = False
        """Whether its writer needs it no more."""
        self.is_needed: Final = signer is not None
        self._then = then
        self._wait = wait
        self._key = key
        self._signer = signer
        if isinstance(signer, FileSigner):
            self._ask(signer)
        elif signer is not None:
            try:
                threading.Thread(target=self._keep_asking, name="strongroom-audit-key", daemon=True).start()
            except RuntimeError:
                return  # the program is ending: its last segments go without

    @property
    def is_lacking(self) -> bool:
        return self.is_needed and self.certificate is None

    @property
    def is_on_its_way(self) -> bool:
        """Whether the first answer is still to come."""
        return self.is_lacking and self.error is None

    def _ask(self, signer: Signer) -> None:
        try:
            self.certificate = certify(signer, self._key)
        except StrongroomError as error:
            self.error = error

    def _keep_asking(self) -> None:
        pause_s = _PAUSE_S
        while self._signer is not None:
            began = time.monotonic()
            self._ask(self._signer)
            self._then()
            if (
                not self.is_lacking
                or self.is_pointless
                or self._wait(max(0.0, pause_s - (time.monotonic() - began)))
            ):
                return
            pause_s = min(_LONGEST_PAUSE_S, pause_s * 2)
