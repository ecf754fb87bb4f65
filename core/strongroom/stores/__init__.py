"""Where checkpoints lie: the `Store` protocol and its implementations."""

from strongroom.stores.base import Buffer, ObjectInfo, ObjectReader, ObjectWriter, Store
from strongroom.stores.local import LocalStore
from strongroom.stores.memory import MemoryStore
from strongroom.stores.open import open_store
from strongroom.stores.s3 import S3Options, S3Store

__all__ = [
    "Buffer",
    "LocalStore",
    "MemoryStore",
    "ObjectInfo",
    "ObjectReader",
    "ObjectWriter",
    "S3Options",
    "S3Store",
    "Store",
    "open_store",
]
