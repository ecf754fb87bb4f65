"""Ceph's object gateway for the tests: a whole cluster of one monitor, one OSD in memory and one gateway.

It is the storage of many sites that have no AWS, and it enforces signatures, identity, session and bucket
policies by itself. Two things of its own (release 16): a user may read what it has written itself, whatever
its policy leaves out, so that only a role's session is held to writing alone; and a session may abort its
uploads without the right to.

Debian has it: ``apt-get install --no-install-recommends radosgw ceph-mon ceph-osd``. Everything lives in
one temporary folder and on loopback ports, needs no root and no network, some 150 MB of memory, and ends
with the context.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest
from s3_identities import Enforcing, Identity, document, statement
from s3_servers import S3Server, free_port

__all__ = ["PROGRAMS", "Rgw", "rgw", "start_rgw"]

PROGRAMS: Final = ("ceph", "ceph-authtool", "ceph-mon", "ceph-osd", "monmaptool", "radosgw", "radosgw-admin")

_START_S = 120.0
_RUNNING: list[Rgw] = []
"""One cluster for all modules that import the fixture."""

_OWNERS: Final = {
    "mon.": {"mon": "allow *"},
    "client.admin": {"mon": "allow *", "osd": "allow *", "mgr": "allow *"},
    "client.rgw": {"mon": "allow rwx", "osd": "allow rwx"},
    "osd.0": {"mon": "allow profile osd", "osd": "allow *", "mgr": "allow profile osd"},
}
"""Whose keys there are, and what they may do: all in the monitor's first keyring, which saves a call each."""


@dataclass(frozen=True, kw_only=True)
class Rgw(Enforcing):
    """A running gateway.

    Attributes:
        port: on the loopback address.
        settings: the cluster's ``ceph.conf``.
    """

    port: int
    settings: Path

    @property
    def server(self) -> S3Server:
        """The gateway as the tests of stores know a server."""
        return S3Server(
            name="rgw", port=self.port, access_key=self.root.access_key, secret_key=self.root.secret_key
        )

    def user(self, *statements: Mapping[str, Any]) -> Identity:
        """A new user with one inline policy of these statements."""
        made = _create_user(self.settings, f"user-{secrets.token_hex(6)}")
        if statements:
            self.client("iam").put_user_policy(
                UserName=made.name, PolicyName="only", PolicyDocument=document(statements)
            )
        return made

    def role(self, *statements: Mapping[str, Any], trust: Mapping[str, Any] | None = None) -> str:
        """A new role with one inline policy of these statements; its ARN.

        Args:
            trust: its trust policy; by default every identity may assume it.
        """
        name = f"role-{secrets.token_hex(6)}"
        usual = statement(["sts:AssumeRole"], None, Principal={"AWS": ["*"]})
        trusted = json.dumps(trust, separators=(",", ":")) if trust else document([usual])
        # The gateway answers CreateRole of boto3 with 400.
        made = _admin(
            self.settings, "role", "create", f"--role-name={name}", f"--assume-role-policy-doc={trusted}"
        )
        if statements:
            self.client("iam").put_role_policy(
                RoleName=name, PolicyName="only", PolicyDocument=document(statements)
            )
        return str(made["Arn"])

    def assume(
        self, role: str, *session_statements: Mapping[str, Any], by: Identity | None = None
    ) -> Identity:
        """A session of a role, as `Enforcing.assume`."""
        return super().assume(role, *session_statements, by=by or self.user())


def _admin(settings: Path, *arguments: str) -> dict[str, Any]:
    done = subprocess.run(
        ["radosgw-admin", "-c", str(settings), "-n", "client.rgw", *arguments],
        capture_output=True,
        text=True,
        timeout=_START_S,
    )
    if done.returncode != 0:
        raise RuntimeError(f"radosgw-admin {' '.join(arguments)}: {done.stderr[-2000:]}")
    found = json.loads(done.stdout)
    assert isinstance(found, dict)
    return found


def _create_user(settings: Path, name: str, *more: str) -> Identity:
    made = Identity(name=name, access_key=secrets.token_hex(10).upper(), secret_key=secrets.token_hex(20))
    _admin(
        settings,
        "user",
        "create",
        f"--uid={name}",
        f"--display-name={name}",
        f"--access-key={made.access_key}",
        f"--secret-key={made.secret_key}",
        *more,
    )
    return made


def _write_settings(folder: Path, monitor: str, cluster: str) -> Path:
    settings = folder / "ceph.conf"
    settings.write_text(f"""[global]
fsid = {cluster}
mon host = {monitor}
mon initial members = a
public addr = 127.0.0.1
cluster addr = 127.0.0.1
ms bind ipv6 = false
auth cluster required = cephx
auth service required = cephx
auth client required = cephx
keyring = {folder}/keyring
run dir = {folder}
pid file =
admin socket =
log file = {folder}/$type.log
crash dir = {folder}
mon data = {folder}/mon
osd data = {folder}/osd
osd objectstore = memstore
memstore device bytes = 4294967296
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 4
osd pool default pgp num = 4
osd pool default pg autoscale mode = off
osd crush chooseleaf type = 0
mon allow pool size one = true
mon max pg per osd = 1000
mon warn on pool no redundancy = false
rgw s3 auth use sts = true
rgw sts key = {secrets.token_hex(8)}
rgw enable usage log = false
rgw region root pool = .rgw.root
rgw gc obj min wait = 1
rgw multipart min part size = 1024
""")
    return settings


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_START_S)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {done.stdout[-1000:]}{done.stderr[-1000:]}")


@contextlib.contextmanager
def _daemon(folder: Path, *command: str) -> Iterator[subprocess.Popen[bytes]]:
    with (folder / f"{command[0]}.out").open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env={"PATH": os.environ["PATH"], "HOME": str(folder), "TMPDIR": str(folder), "LANG": "C.UTF-8"},
            start_new_session=True,
        )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(_START_S)


@contextlib.contextmanager
def start_rgw() -> Iterator[Rgw]:
    """The cluster, for as long as the context lasts.

    Raises:
        RuntimeError: a part of it did not start.
    """
    # Short, since sockets are made in it.
    with tempfile.TemporaryDirectory(prefix="rgw-") as made, contextlib.ExitStack() as stack:
        folder = Path(made)
        monitor, cluster = f"v2:127.0.0.1:{free_port()}/0", str(uuid.uuid4())
        settings = _write_settings(folder, f"[{monitor}]", cluster)
        keyring = folder / "keyring"
        for owner, rights in _OWNERS.items():
            caps = [word for kind, right in rights.items() for word in ("--cap", kind, right)]
            fresh = [] if keyring.exists() else ["--create-keyring"]
            _run("ceph-authtool", *fresh, str(keyring), "--gen-key", "-n", owner, *caps)
        config = ("-c", str(settings))
        _run("monmaptool", "--create", "--fsid", cluster, "--addv", "a", f"[{monitor}]", str(folder / "map"))
        (folder / "mon").mkdir()
        (folder / "osd").mkdir()
        _run(
            "ceph-mon",
            *config,
            "--mkfs",
            "-i",
            "a",
            "--monmap",
            str(folder / "map"),
            "--keyring",
            str(keyring),
        )
        stack.enter_context(_daemon(folder, "ceph-mon", *config, "-f", "-i", "a"))
        disk = str(uuid.uuid4())
        _run("ceph", *config, "--connect-timeout", "60", "osd", "new", disk, "0")
        _run("ceph-osd", *config, "-i", "0", "--mkfs", "--osd-uuid", disk)
        stack.enter_context(_daemon(folder, "ceph-osd", *config, "-f", "-i", "0"))
        # An administrator, since a bucket's owner may not read what a role has written into it.
        root = _create_user(settings, "admin", "--admin", "--caps=roles=*;users=*;user-policy=*")
        port = free_port()
        gateway = stack.enter_context(
            _daemon(
                folder,
                "radosgw",
                *config,
                "-f",
                "-n",
                "client.rgw",
                f"--rgw-frontends=beast endpoint=127.0.0.1:{port}",
            )
        )
        end = time.monotonic() + _START_S
        while not _listens(port):
            if gateway.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"radosgw did not start:\n{_log(folder)}")
            time.sleep(0.05)
        yield Rgw(address=f"http://127.0.0.1:{port}", root=root, port=port, settings=settings)


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 2):
        return True
    return False


def _log(folder: Path) -> str:
    return "\n".join(path.read_text(errors="replace")[-2000:] for path in sorted(folder.glob("*.out")))


@pytest.fixture(scope="session")
def rgw() -> Iterator[Rgw]:
    """A running gateway; skipped, with the reason, where Ceph's programs are not installed."""
    absent = [program for program in PROGRAMS if shutil.which(program) is None]
    if absent:
        pytest.skip(
            f"{', '.join(absent)} not installed; on Debian: "
            "apt-get install --no-install-recommends radosgw ceph-mon ceph-osd"
        )
    if _RUNNING:
        yield _RUNNING[0]
        return
    with start_rgw() as running:
        _RUNNING.append(running)
        try:
            yield running
        finally:
            _RUNNING.remove(running)
