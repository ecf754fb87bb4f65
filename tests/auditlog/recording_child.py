"""A process that records, for tests: ``recording_child.py WHAT FOLDER ...``."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from recorders import LONG_S, Place, act

from strongroom_security.auditlog.recording.auditor import LogAuditor


def record_some(place: Place, numbers: range) -> None:
    if "STRONGROOM_TEST_SINK_IS_A_FILE" in os.environ:
        place.sink.write_bytes(b"")
    auditor = LogAuditor(place.settings())
    for number in numbers:
        auditor.record(act(number))


def fork(place: Place) -> None:
    """Both sides of a fork record, and both end."""
    auditor = LogAuditor(place.settings())
    auditor.record(act(1))
    pid = os.fork()
    if pid == 0:
        auditor.record(act(2))
        auditor.close(within_s=LONG_S)
        os._exit(0)
    os.waitpid(pid, 0)
    auditor.record(act(3))


def fork_quietly(place: Place) -> None:
    auditor = LogAuditor(place.settings())
    auditor.record(act(1))
    for _ in range(4):
        pid = os.fork()
        if pid == 0:
            auditor.secure(within_s=LONG_S)
            auditor.close(within_s=LONG_S)
            os._exit(0)
        os.waitpid(pid, 0)
    auditor.record(act(2))


def with_multiprocessing(place: Place) -> None:
    auditor = LogAuditor(place.settings())
    auditor.record(act(1))
    context = multiprocessing.get_context("fork")
    child = context.Process(target=auditor.record, args=(act(2),))
    child.start()
    child.join(LONG_S)
    auditor.record(act(3))


def killed(place: Place, times: int) -> None:
    """Fork, record, and kill the child once it has recorded so many; print how many each had at least."""
    for number in range(times):
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            auditor = LogAuditor(place.settings(seal_events=5, salvages=False))
            for each in range(1_000_000):
                auditor.record(act(number * 1000 + each))
                os.write(writer, b".")
        os.close(writer)
        for _ in range(number + 1):
            os.read(reader, 1)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        left = 0
        while data := os.read(reader, 65536):
            left += len(data)
        os.close(reader)
        os.write(1, b"%d\n" % (number + 1 + left))


def cloned(place: Place, first: int) -> None:
    """Record under an id and a key that another process has, too; wait for it at each segment."""
    key = Ed25519PrivateKey.from_private_bytes(b"\x01" * 32)
    drawn = iter([("ab" * 16, key)])

    def draw() -> tuple[str, Ed25519PrivateKey]:
        return next(drawn, (f"{os.getpid():032x}", Ed25519PrivateKey.generate()))

    place.spool = place.spool.with_name(f"spool-{first}")
    auditor = LogAuditor(place.settings(draw=draw))
    for number in range(3):
        auditor.record(act(first + number))
        sys.stdin.readline()
        auditor.secure(within_s=LONG_S)
        os.write(1, b"secured\n")


def main() -> None:
    what, folder, *more = sys.argv[1:]
    place = Place(Path(folder))
    if what == "record":
        record_some(place, range(int(more[0])))
    elif what == "fork":
        fork(place)
    elif what == "fork-quietly":
        fork_quietly(place)
    elif what == "multiprocessing":
        with_multiprocessing(place)
    elif what == "killed":
        killed(place, int(more[0]))
    elif what == "cloned":
        cloned(place, int(more[0]))


if __name__ == "__main__":
    main()
