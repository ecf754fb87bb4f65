"""What the tests here share: real servers that speak S3."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from s3_servers import ministack_s3, moto_s3

__all__ = ["ministack_s3", "moto_s3"]
