"""A store in a bucket: `S3Store`. Importing this needs no boto3; building a store does."""

from strongroom.stores.s3.options import S3Options
from strongroom.stores.s3.store import S3Store

__all__ = ["S3Options", "S3Store"]
