"""The benchmarks are a package of their own, which tox finds by PYTHONPATH and the tests here."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
