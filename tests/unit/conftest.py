"""What a test of a whole run trains stands in a file of its own, and is a program too."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
