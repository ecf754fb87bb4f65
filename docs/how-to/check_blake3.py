"""Check every file of a checkpoint against its MANIFEST.json. Needs Python and blake3, and no Strongroom.

    pip install blake3
    python check_blake3.py CHECKPOINT/data

Verify the signature over MANIFEST.json first: this holds the other files against it. Exit status: 0 all
are right, 1 some are not.
"""

import json
import sys
from pathlib import Path

from blake3 import blake3

BLOCK_BYTES = 1 << 20


def digest(path):
    """BLAKE3 over the digests of the file's blocks of 1 MiB."""
    whole = blake3()
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            whole.update(blake3(block).digest())
    return f"blake3:{whole.hexdigest()}"


folder = Path(sys.argv[1])
manifest = json.loads((folder / "MANIFEST.json").read_bytes())
listed = {record["path"]: record for record in manifest["files"]}
there = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir()}
wrong = [f"{name}: not listed" for name in sorted(there - {*listed, "MANIFEST.json"})]
for name, record in listed.items():
    path = folder / name
    if name not in there or path.is_symlink():
        wrong.append(f"{name}: missing, or a link")
    elif path.stat().st_size != record["size"] or digest(path) != record["digest"]:
        wrong.append(f"{name}: other bytes")
sys.stdout.write(("\n".join(wrong) or f"{len(listed)} files are right") + "\n")
sys.exit(bool(wrong))
