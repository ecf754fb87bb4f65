"""What the tests here share: children import by name, and so does whoever seals by the letter of FLOE."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent

sys.path[:0] = [str(HERE), str(HERE / "vectors"), str(HERE.parent / "stores")]
