"""Who does it, and where: what this process knows of itself, without ever waiting to know it.

What takes a while (the user's name where a directory service has it, the caller's identity at STS) is asked
for beside the program, and stands in the events from then on.
"""

from __future__ import annotations

import os
import pwd
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final

from strongroom.auditing import Act, Action
from strongroom.errors import StrongroomError
from strongroom.provenance.job import job_in
from strongroom.roles import Duty
from strongroom_security import aws
from strongroom_security.auditlog.format.events import Actor

__all__ = ["Actors", "SessionOf", "address_of_this_host", "job_of", "rank_of"]

SessionOf = Callable[[Duty], Any]
"""boto3's session of a duty; None: this process's own."""

_JOB: Final = frozenset(
    {
        "SLURM_JOB_ID", "SLURM_JOB_NAME", "SLURM_JOB_USER", "SLURM_JOB_ACCOUNT", "SLURM_STEP_ID",
        "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID", "SLURM_RESTART_COUNT", "SLURM_CLUSTER_NAME",
        "POD_NAME", "POD_NAMESPACE", "POD_UID", "NAMESPACE", "NODE_NAME", "JOB_NAME", "JOB_COMPLETION_INDEX",
        "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "GROUP_RANK",
    }
)  # fmt: skip
"""What says which job it is. It stands in every event, so that what only describes the job is left out."""
_VALUE_CHARS: Final = 128
_RANKS: Final = ("RANK", "SLURM_PROCID")

_NAME_WITHIN_S: Final = 0.2
"""For which the first event waits for the user's name; the number is there at once."""

_LOOK_AGAIN_S: Final = 300.0
_CONNECT_S: Final = 3.0
_READ_S: Final = 5.0
_WHOM: Final = "the audit log's caller"

_READS: Final = frozenset(
    {
        Action.RESTORE, Action.READ, Action.PLAN, Action.LIST, Action.SHOW, Action.PROVENANCE, Action.VERIFY,
        Action.EXPORT, Action.UNWRAP, Action.KEYS, Action.BREAK_GLASS,
    }
)  # fmt: skip
"""What goes by the credentials for restoring, where they are others than those for saving."""


def job_of(environment: Mapping[str, str]) -> dict[str, str]:
    """What scheduled this process, by names such as ``slurm.SLURM_JOB_ID``."""
    return {
        f"{scheduler}.{name}": value[:_VALUE_CHARS]
        for scheduler, values in job_in(environment).items()
        for name, value in values.items()
        if name in _JOB
    }


def rank_of(environment: Mapping[str, str]) -> int | None:
    """The rank within the job, as launchers set it; None: nothing says."""
    for name in _RANKS:
        text = environment.get(name, "")
        if text.isascii() and text.isdigit() and len(text) < 10:
            return int(text)
    return None


def address_of_this_host() -> str | None:
    """The address that connections from here come from; no name is looked up, and no packet sent."""
    # Documentation's addresses (RFC 5737, RFC 3849) are nobody's, and take the default route.
    for family, target in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((target, 9))
                return str(probe.getsockname()[0])
        except OSError:
            continue
    return None


class Actors:
    """This process, as the actor of its events. A forked child needs one of its own.

    Args:
        role: of the policy's ``[role]``.
        session_of: by whose credentials AWS is asked.
        asks_aws: whether it is, wherever a checkpoint is; else only for what is in a bucket.
        environment: says which job and rank this is.
    """

    def __init__(
        self,
        *,
        role: str | None,
        session_of: SessionOf,
        asks_aws: bool,
        environment: Mapping[str, str],
    ) -> None:
        uid = os.geteuid()
        self._actor = Actor(
            user=str(uid),
            uid=str(uid),
            pid=os.getpid(),
            process=_program(),
            host=socket.gethostname(),
            ip=address_of_this_host(),
            job=job_of(environment),
            rank=rank_of(environment),
            role=role,
        )
        self._session_of = session_of
        self._asks_aws = asks_aws
        self._has_sts = _has_sts(environment)
        self._identities: dict[Duty, str] = {}
        self._keys: dict[Duty, str] = {}
        self._looked_at = 0.0
        self._lock = threading.RLock()  # a signal's handler may come in between
        self._has_looked: dict[Duty, threading.Event] = {}
        self._has_name = threading.Event()
        self._begin(self._find_name)
        self._has_name.wait(_NAME_WITHIN_S)

    @property
    def host(self) -> str:
        return self._actor.host

    @property
    def pid(self) -> int:
        return self._actor.pid

    def of(self, act: Act) -> Actor:
        """The actor of something that is done now."""
        if not self._goes_to_aws(act):
            return self._actor
        duty = _duty_of(act.action)
        if duty not in self._has_looked:
            self._look(duty)
        identity = self._identities.get(duty)
        return self._actor if identity is None else replace(self._actor, identity=identity)

    def wait_for_identity(self, act: Act, within_s: float) -> None:
        """Return once it is known by whose credentials that is done, or that it cannot be known now."""
        if self._goes_to_aws(act):
            self.of(act)
            self._has_looked[_duty_of(act.action)].wait(within_s)

    def _goes_to_aws(self, act: Act) -> bool:
        return self._has_sts and (self._asks_aws or act.root[:5] == "s3://")

    def refresh(self) -> None:
        """Ask who the caller is, where that may have changed; never waits."""
        if not self._has_looked or self._looked_at + _LOOK_AGAIN_S > time.monotonic():
            return
        self._looked_at = time.monotonic()
        for duty, has_looked in list(self._has_looked.items()):
            if has_looked.is_set():
                self._begin(partial(self._find_identity, duty))

    def _look(self, duty: Duty) -> None:
        """Ask for the first time. A duty that nothing is done for has no credentials taken up for it."""
        with self._lock:
            if duty in self._has_looked:
                return
            has_looked = self._has_looked[duty] = threading.Event()
            self._looked_at = time.monotonic()

        def look() -> None:
            try:
                self._find_identity(duty)
            finally:
                has_looked.set()

        self._begin(look)

    @staticmethod
    def _begin(work: Callable[[], None]) -> None:
        try:
            threading.Thread(target=work, name="strongroom-audit-actor", daemon=True).start()
        except RuntimeError:
            return  # the program is ending, and its last events go without

    def _find_name(self) -> None:
        try:
            name = pwd.getpwuid(int(self._actor.uid)).pw_name
        except KeyError:
            name = self._actor.user  # as in containers: a number that has no name
        self._actor = replace(self._actor, user=name)
        self._has_name.set()

    def _find_identity(self, duty: Duty) -> None:
        try:
            session = self._session_of(duty) or aws.new_session(whom=_WHOM)
            key, failure = aws.once(lambda: _key_of(session), {}, whom=_WHOM)
            if failure is not None or key is None or self._keys.get(duty) == key:
                return
            client = aws.client(session, "sts", whom=_WHOM, connect_s=_CONNECT_S, read_s=_READ_S)
        except StrongroomError:
            return  # they were let go of, or cannot be had: whoever needs them tells that
        answer, failure = aws.once(client.get_caller_identity, {}, whom=_WHOM)
        if failure is None and isinstance(answer.get("Arn"), str):
            self._identities[duty] = answer["Arn"]
            self._keys[duty] = key


def _has_sts(environment: Mapping[str, str]) -> bool:
    """Whether there is an STS to ask: with an S3 server of one's own only where that is said, too."""
    if not environment.get("AWS_ENDPOINT_URL_S3"):
        return True
    return any(environment.get(name) for name in ("AWS_ENDPOINT_URL_STS", "AWS_ENDPOINT_URL"))


def _duty_of(action: Action) -> Duty:
    return Duty.RESTORE if action in _READS else Duty.SAVE


def _key_of(session: Any) -> str | None:
    credentials = session.get_credentials()
    return None if credentials is None else str(credentials.get_frozen_credentials().access_key)


def _program() -> str:
    main = sys.modules.get("__main__")
    spec = getattr(main, "__spec__", None)
    if spec is not None and spec.name:
        return str(spec.name).removesuffix(".__main__")
    return os.path.basename(sys.argv[0] if sys.argv and sys.argv[0] not in ("", "-c") else sys.executable)
