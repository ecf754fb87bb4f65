"""What a save asks of a bucket when it may only create objects there, and all that such a caller is refused.

The tests of write-only saves run it on every server that holds callers to their policies.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Final

from s3_identities import Enforcing, Identity

from strongroom.stores.s3 import S3Options, S3Store

__all__ = [
    "LONG",
    "PART_BYTES",
    "PUT",
    "REFUSED",
    "TWO_RIGHTS",
    "WRITTEN",
    "arn",
    "contents",
    "save_path",
    "store_of",
    "unfinished",
]

PART_BYTES: Final = 64 << 10
LONG: Final = secrets.token_bytes(2 * PART_BYTES + 12345)
"""Three parts."""

PUT: Final = "s3:PutObject"
TWO_RIGHTS: Final = ("s3:AbortMultipartUpload", "s3:ListMultipartUploadParts")


def store_of(server: Enforcing, bucket: str, identity: Identity, run: str = "a") -> S3Store:
    """A run's root by somebody's credentials."""
    options = S3Options(
        endpoint_url=server.address, addressing_style="path", part_bytes=PART_BYTES, parts_in_flight=3
    )
    return S3Store(f"s3://{bucket}/runs/{run}", options=options, session=identity.session())


def save_path(store: S3Store) -> None:
    """Every call by which a save writes."""
    assert store.put_if_absent("launches/000001", b"launch")
    assert not store.put_if_absent("launches/000001", b"another's")
    with store.open_writer("step-1/data/shard", length_bytes=len(LONG)) as writer:
        for start in range(0, len(LONG), 50_000):
            writer.write(memoryview(LONG)[start : start + 50_000])
        writer.finish()
    with store.open_writer("step-1/data/short", length_bytes=5) as writer:
        writer.write(b"short")
        writer.finish()
    store.put("step-1/data/index", b"index")
    store.make_durable("step-1")
    assert store.put_if_absent("step-1/COMMIT", b"commit")


WRITTEN: Final = {
    "launches/000001": b"launch",
    "step-1/data/shard": LONG,
    "step-1/data/short": b"short",
    "step-1/data/index": b"index",
    "step-1/COMMIT": b"commit",
}


def contents(server: Enforcing, bucket: str) -> dict[str, bytes]:
    """What the administrator finds under the run ``a``."""
    client = server.client("s3")
    listed = client.list_objects_v2(Bucket=bucket).get("Contents", [])
    return {
        entry["Key"].removeprefix("runs/a/"): client.get_object(Bucket=bucket, Key=entry["Key"])[
            "Body"
        ].read()
        for entry in listed
    }


def unfinished(server: Enforcing, bucket: str) -> list[str]:
    """The keys of uploads that were begun and not ended."""
    uploads = server.client("s3").list_multipart_uploads(Bucket=bucket).get("Uploads", [])
    return [upload["Key"] for upload in uploads]


REFUSED: Final[dict[str, Callable[[S3Store], object]]] = {
    "read": lambda store: store.read("step-1/COMMIT", limit_bytes=100),
    "open_reader": lambda store: store.open_reader("step-1/data/shard"),
    "stat": lambda store: store.stat("step-1/COMMIT"),
    "read what is absent": lambda store: store.read("absent", limit_bytes=100),
    "list_names": lambda store: store.list_names(""),
    "list_names of a folder": lambda store: store.list_names("step-1"),
    "outline": lambda store: store.outline("data"),
    "delete": lambda store: store.delete("step-1/COMMIT"),
    "delete_tree": lambda store: store.delete_tree("step-1"),
    "unfinished_uploads": lambda store: store.unfinished_uploads(),
}


def arn(bucket: str, *parts: str) -> str:
    """What a policy calls a bucket, or what lies in it."""
    return "/".join((f"arn:aws:s3:::{bucket}", *parts))
