"""Real servers that speak S3, for tests: moto and ministack, each a process on a loopback port of its own.

Start one a session or a module, and give each test a bucket. Where a server cannot be had the test is
skipped with the reason; under continuous integration, where all must be had, it fails.

Fixtures: ``from s3_servers import moto_s3, ministack_s3`` (in ``tests/stores`` they are there already).
Elsewhere: ``with start_moto() as server: bucket = server.make_bucket()``.
"""

from __future__ import annotations

import contextlib
import functools
import http.client
import importlib.util
import itertools
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import pytest

__all__ = [
    "REGION",
    "S3Server",
    "cannot",
    "free_port",
    "ministack_s3",
    "moto_s3",
    "start_ministack",
    "start_moto",
]

REGION = "us-east-1"
START_S = 60.0

_bucket_numbers = itertools.count(1)


def cannot(reason: str) -> NoReturn:
    """Skip, or fail where everything must run."""
    if os.environ.get("CI"):
        pytest.fail(f"{reason}; continuous integration installs what these tests need")
    pytest.skip(reason)


def free_port() -> int:
    """A loopback port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass(frozen=True, kw_only=True)
class S3Server:
    """A server that runs.

    Attributes:
        name: which one.
        port: on the loopback address.
        access_key, secret_key: of whoever may do everything there.
    """

    name: str
    port: int
    access_key: str = "testing"
    secret_key: str = field(default="testing", repr=False)

    @property
    def endpoint_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def environment(self) -> dict[str, str]:
        """Variables by which boto3, and so a plain ``s3://`` root, finds this server and nothing else."""
        return {
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_DEFAULT_REGION": REGION,
            "AWS_ENDPOINT_URL_S3": self.endpoint_url,
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        }

    @functools.cached_property
    def session(self) -> Any:
        """A boto3 session of whoever may do everything; it knows no endpoint."""
        return self.new_session()

    def new_session(self) -> Any:
        """One of its own, for a test that listens in."""
        import boto3
        import botocore.session

        core = botocore.session.Session()
        # What boto3 knows of S3 is a large file, which is read once for all sessions.
        core.register_component("data_loader", _loader())
        return boto3.Session(
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
            region_name=REGION,
            botocore_session=core,
        )

    @functools.cached_property
    def behind(self) -> Any:
        """A plain boto3 client, for looking behind a store."""
        return self.client()

    def client(self, **options: Any) -> Any:
        """A plain boto3 client of its own."""
        return self.session.client("s3", endpoint_url=self.endpoint_url, **options)

    def make_bucket(self, name: str | None = None) -> str:
        """Make a bucket of its own; return its name."""
        made = name or f"bucket-{os.getpid()}-{next(_bucket_numbers)}"
        self.behind.create_bucket(Bucket=made)
        return made

    def keys(self, bucket: str) -> list[str]:
        """Whole keys of all objects in a bucket, in order."""
        pages = self.behind.get_paginator("list_objects_v2").paginate(Bucket=bucket)
        return [entry["Key"] for page in pages for entry in page.get("Contents", [])]

    def uploads(self, bucket: str) -> list[str]:
        """Keys of all unfinished uploads in a bucket."""
        return [
            entry["Key"] for entry in self.behind.list_multipart_uploads(Bucket=bucket).get("Uploads", [])
        ]


@functools.cache
def _loader() -> Any:
    from botocore.loaders import create_loader

    return create_loader()


def _answers(port: int, path: str) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=2)
    try:
        connection.request("GET", path)
        return connection.getresponse().status < 500
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


@contextlib.contextmanager
def _running(
    command: list[str], port: int, path: str, environment: Mapping[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    """A process that listens on a port, in a group and a folder of its own; ended with all it has started."""
    with tempfile.TemporaryDirectory(prefix="s3-server-") as folder:
        log = Path(folder, "log")
        with log.open("ab") as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env={"PATH": os.environ["PATH"], "HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8"}
                | environment,
                start_new_session=True,
            )
        try:
            end = time.monotonic() + START_S
            while not _answers(port, path):
                if process.poll() is not None or time.monotonic() > end:
                    raise RuntimeError(
                        f"{command[:4]} did not start:\n{log.read_text(errors='replace')[-2000:]}"
                    )
                time.sleep(0.02)
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(START_S)


_MOTO = """
import sys
from moto.server import main
main(["-H", "127.0.0.1", "-p", sys.argv[1]])
"""


@contextlib.contextmanager
def start_moto(*, environment: Mapping[str, str] | None = None) -> Iterator[S3Server]:
    """Moto's server: the semantics of S3, and no permissions."""
    for name in ("boto3", "moto", "flask"):
        if importlib.util.find_spec(name) is None:
            cannot(f"there is no moto server: {name} is not installed; pip install boto3 'moto[server]'")
    port = free_port()
    command = [sys.executable, "-c", _MOTO, str(port)]
    with _running(command, port, "/moto-api/data.json", environment or {}):
        yield S3Server(name="moto", port=port)


@contextlib.contextmanager
def start_ministack(*, environment: Mapping[str, str] | None = None) -> Iterator[S3Server]:
    """Ministack: another server's reading of S3.

    Args:
        environment: such as ``AUTH``, where the installed release knows it.
    """
    for name in ("boto3", "ministack"):
        if importlib.util.find_spec(name) is None:
            cannot(f"there is no ministack server: {name} is not installed; pip install boto3 ministack")
    port = free_port()
    settings = {"GATEWAY_PORT": str(port), "BIND_HOST": "127.0.0.1", "LOG_LEVEL": "WARNING", "SERVICES": "s3"}
    command = [sys.executable, "-m", "ministack"]
    with _running(command, port, "/_ministack/health", settings | dict(environment or {})):
        yield S3Server(name="ministack", port=port)


_SHARED: dict[str, tuple[S3Server, contextlib.ExitStack]] = {}
_SHARED_LOCK = threading.Lock()


@contextlib.contextmanager
def _shared(
    name: str, start: Callable[[], contextlib.AbstractContextManager[S3Server]]
) -> Iterator[S3Server]:
    """One server for all modules that import a fixture: the first user ends last."""
    with _SHARED_LOCK:
        running = _SHARED.get(name)
        if running is None:
            stack = contextlib.ExitStack()
            _SHARED[name] = (stack.enter_context(start()), stack)
    if running is not None:
        yield running[0]
        return
    server, stack = _SHARED[name]
    try:
        yield server
    finally:
        del _SHARED[name]
        stack.close()


@pytest.fixture(scope="session")
def moto_s3() -> Iterator[S3Server]:
    """A running moto."""
    with _shared("moto", start_moto) as server:
        yield server


@pytest.fixture(scope="session")
def ministack_s3() -> Iterator[S3Server]:
    """A running ministack."""
    with _shared("ministack", start_ministack) as server:
        yield server
