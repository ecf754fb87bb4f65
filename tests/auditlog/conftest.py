"""What the tests here share is imported by name, and so are the servers of other tests."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent

sys.path[:0] = [str(HERE), str(HERE.parent / "stores"), str(HERE.parent / "security")]
