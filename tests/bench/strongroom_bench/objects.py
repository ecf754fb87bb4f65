"""Objects to and from a bucket, beside plain boto3 and `s3torchconnector`, on a server of this machine.

A local server costs far more processor time than waiting for a real one does, and shares the processors with
what is measured: the ratios say whether we stand in the way, and nothing of how fast S3 is. Ceph's gateway is
taken where it is installed, since it costs least, else ministack; ``STRONGROOM_BENCH_S3`` names one of them.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from strongroom.stores.offers import tuning_of
from strongroom.stores.s3 import S3Options, S3Store
from strongroom_bench.children import run, status_bytes
from strongroom_bench.figure import Figure, beside, fold
from strongroom_bench.measure import Contestant, interleave, seconds
from strongroom_bench.scale import MIB, Scale

__all__ = ["measure", "measure_memory"]

PART_BYTES: Final = 16 * MIB
IN_FLIGHT: Final = 16
"""Parts, or ranges, at once: everybody's."""

WRITERS: Final = 4
"""Threads that write objects at once, as a rank has."""

_WRITE_BYTES: Final = 16 * MIB
"""What a rank hands over at once."""

_OURS: Final = "strongroom"
_BOTO: Final = "boto3"
_TORCH: Final = "s3torchconnector"


def measure(scale: Scale, folder: Path) -> list[Figure]:
    """Time uploads and downloads, count their requests, and look at the memory that an upload adds."""
    with _server() as server:
        bucket = server.make_bucket()
        # A quarter of the large state: 256 MiB in a full run.
        data = os.urandom(scale.state_bytes // 4)
        shapes = {
            "one object": [data],
            "8 objects": [
                data[start : start + len(data) // 8] for start in range(0, len(data), len(data) // 8)
            ],
        }
        figures = []
        for name, bodies in shapes.items():
            figures += _figures(scale, name, bodies, server, bucket)
        added = run("upload", server.endpoint_url, bucket, str(len(data)), *_keys(server))["added"]
    bound = (IN_FLIGHT * PART_BYTES) / MIB
    figures.append(
        Figure(
            figure="peak host memory added by an upload",
            value=added / MIB,
            unit="MiB",
            # The parts on their way, what sockets and TLS hold, and the interpreter's own.
            bar=min(bound, len(data) / MIB) + 64,
            peers={"parts in flight x part MiB": bound, "object MiB": len(data) / MIB},
            runs=1,
            setting=f"{len(data) / MIB:g} MiB in one object, VmHWM of a process of its own, {server.name}",
        )
    )
    return figures


def _figures(scale: Scale, shape: str, bodies: Sequence[bytes], server: Any, bucket: str) -> list[Figure]:
    peers = _peers(server, bucket, bodies)
    figures = []
    words = ", ".join(
        (
            server.name,
            f"objects of {len(bodies[0]) / MIB:g} MiB",
            f"parts of {PART_BYTES // MIB} MiB",
            f"{IN_FLIGHT} in flight",
            f"{min(WRITERS, len(bodies))} threads",
        )
    )
    for verb, does in (("upload", lambda peer: peer.upload), ("download", lambda peer: peer.download)):
        samples = interleave(
            [Contestant(name=name, run=_timed(does(peer)), tidy=peer.tidy) for name, peer in peers.items()],
            rounds=scale.rounds,
            warm_ups=scale.warm_ups,
            flushes=False,
        )
        counts = {name: peer.requests(does(peer)) for name, peer in peers.items() if peer.counter is not None}
        total = sum(map(len, bodies))
        figures.append(
            beside(
                f"{verb} of {shape} / boto3's {verb}_fileobj",
                _OURS,
                _BOTO,
                fold(samples, "wall"),
                setting=words,
                note="our uploads send a SHA-256 a part, which the server verifies"
                if verb == "upload"
                else "",
            )
        )
        figures.append(
            Figure(
                figure=f"requests a GiB, {verb} of {shape}",
                value=counts[_OURS] * (1 << 30) / total,
                unit="requests",
                peers={f"{name} requests": count * (1 << 30) / total for name, count in counts.items()},
                runs=1,
                setting=words,
            )
        )
    for peer in peers.values():
        peer.close()
    return figures


def _timed(work: Callable[[], None]) -> Callable[[], dict[str, float]]:
    return lambda: {"wall": seconds(work)}


@dataclass(frozen=True, kw_only=True)
class _Peer:
    """One way to move the same bytes.

    Attributes:
        upload, download: all of them.
        counter: of the requests that were sent; None where they cannot be counted.
    """

    upload: Callable[[], None]
    download: Callable[[], None]
    counter: Counter[str] | None = None
    tidy: Callable[[], None] = lambda: None
    close: Callable[[], None] = lambda: None

    def requests(self, work: Callable[[], None]) -> int:
        assert self.counter is not None
        self.tidy()
        self.counter.clear()
        work()
        found = self.counter.total()
        self.tidy()
        return found


def _peers(server: Any, bucket: str, bodies: Sequence[bytes]) -> dict[str, _Peer]:
    found = {_OURS: _ours(server, bucket, bodies), _BOTO: _boto(server, bucket, bodies)}
    # It does not understand every server: Ceph's release 16 answers without what it looks for.
    if importlib.util.find_spec("s3torchconnector") is not None and server.name != "rgw":
        found[_TORCH] = _torch(server, bucket, bodies)
    return found


def _each(bodies: Sequence[bytes], work: Callable[[int], object]) -> None:
    """Do it for every body, several at once."""
    with ThreadPoolExecutor(min(WRITERS, len(bodies))) as pool:
        for done in [pool.submit(work, number) for number in range(len(bodies))]:
            done.result()


def _counting(session: Any) -> Counter[str]:
    counter: Counter[str] = Counter()
    session.events.register("before-send.s3", lambda request, **_: counter.update([request.method]))
    return counter


def _store(endpoint_url: str, bucket: str, session: Any) -> S3Store:
    options = S3Options(
        endpoint_url=endpoint_url,
        addressing_style="path",
        part_bytes=PART_BYTES,
        parts_in_flight=IN_FLIGHT,
    )
    return S3Store(f"s3://{bucket}/ours", options=options, session=session)


def _upload(store: S3Store, key: str, body: bytes) -> None:
    with store.open_writer(key, length_bytes=len(body)) as writer:
        view = memoryview(body)
        for start in range(0, len(body), _WRITE_BYTES):
            writer.write(view[start : start + _WRITE_BYTES])
        writer.finish()


def _ours(server: Any, bucket: str, bodies: Sequence[bytes]) -> _Peer:
    session = server.new_session()
    counter = _counting(session)
    store = _store(server.endpoint_url, bucket, session)
    tuning = tuning_of(store)
    targets = [bytearray(len(body)) for body in bodies]
    # An object is never written twice: every upload has a folder of its own, and the last one is kept.
    uploads: list[int] = []

    def upload() -> None:
        uploads.append(len(uploads))
        _each(bodies, lambda number: _upload(store, f"u{uploads[-1]}/{number}", bodies[number]))

    def tidy() -> None:
        for number in uploads[:-1]:
            store.delete_tree(f"u{number}")

    def download() -> None:
        with ThreadPoolExecutor(tuning.reads) as pool, contextlib.ExitStack() as stack:
            under_way = []
            for number, target in enumerate(targets):
                reader = stack.enter_context(store.open_reader(f"u{uploads[-1]}/{number}"))
                for start in range(0, len(target), tuning.read_bytes):
                    view = memoryview(target)[start : start + tuning.read_bytes]
                    under_way.append(pool.submit(reader.read_into, start, view))
            for done in under_way:
                done.result()
        assert targets[0] == bodies[0]

    def close() -> None:
        store.delete_tree(f"u{uploads[-1]}")

    return _Peer(upload=upload, download=download, counter=counter, tidy=tidy, close=close)


def _boto(server: Any, bucket: str, bodies: Sequence[bytes]) -> _Peer:
    from boto3.s3.transfer import TransferConfig
    from botocore.config import Config

    session = server.new_session()
    counter = _counting(session)
    client = session.client(
        "s3",
        endpoint_url=server.endpoint_url,
        config=Config(s3={"addressing_style": "path"}, max_pool_connections=WRITERS * IN_FLIGHT),
    )
    transfer = TransferConfig(multipart_chunksize=PART_BYTES, max_concurrency=IN_FLIGHT)
    targets = [io.BytesIO(bytes(len(body))) for body in bodies]

    def upload(number: int) -> None:
        client.upload_fileobj(io.BytesIO(bodies[number]), bucket, f"boto/{number}", Config=transfer)

    def download(number: int) -> None:
        targets[number].seek(0)
        client.download_fileobj(bucket, f"boto/{number}", targets[number], Config=transfer)

    def download_all() -> None:
        _each(bodies, download)
        assert targets[0].getbuffer() == bodies[0]

    return _Peer(
        upload=lambda: _each(bodies, upload), download=download_all, counter=counter, close=client.close
    )


def _torch(server: Any, bucket: str, bodies: Sequence[bytes]) -> _Peer:
    from s3torchconnector import S3ClientConfig
    from s3torchconnector._s3client import S3Client

    # Its library looks nowhere else.
    os.environ["AWS_ACCESS_KEY_ID"], os.environ["AWS_SECRET_ACCESS_KEY"] = _keys(server)
    client = S3Client(
        "us-east-1",
        endpoint=server.endpoint_url,
        s3client_config=S3ClientConfig(force_path_style=True, part_size=PART_BYTES),
    )

    def upload(number: int) -> None:
        writer = client.put_object(bucket, f"torch/{number}")
        writer.write(bodies[number])
        writer.close()

    def download(number: int) -> None:
        assert len(client.get_object(bucket, f"torch/{number}").read()) == len(bodies[number])

    return _Peer(upload=lambda: _each(bodies, upload), download=lambda: _each(bodies, download))


def measure_memory(
    endpoint_url: str, bucket: str, size: str, access_key: str, secret_key: str
) -> dict[str, Any]:
    """In a process of its own: what an upload adds to the memory of this process at its peak."""
    import boto3

    session = boto3.Session(
        aws_access_key_id=access_key, aws_secret_access_key=secret_key, region_name="us-east-1"
    )
    store = _store(endpoint_url, bucket, session)
    body = os.urandom(int(size))
    # What is imported late, and threads and sockets, are no memory of an upload.
    _upload(store, "memory/warm", body[:1])
    before = status_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    _upload(store, "memory/object", body)
    return {"added": max(0, status_bytes("VmHWM") - before)}


def _keys(server: Any) -> tuple[str, str]:
    return server.access_key, server.secret_key


@contextlib.contextmanager
def _server() -> Iterator[Any]:
    """The one that costs least of those that are installed."""
    # The tests know how to start them.
    sys.path.insert(0, str(Path(__file__).parents[2] / "stores"))
    from ceph_rgw import PROGRAMS, start_rgw
    from s3_servers import start_ministack

    wanted = os.environ.get("STRONGROOM_BENCH_S3")
    is_there = all(shutil.which(program) is not None for program in PROGRAMS)
    if wanted == "rgw" or (wanted is None and is_there):
        with start_rgw() as gateway:
            yield gateway.server
    else:
        with start_ministack() as server:
            yield server
