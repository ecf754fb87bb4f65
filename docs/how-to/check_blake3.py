"""Check every file of a checkpoint against its MANIFEST.json. Needs Python and blake3, and no Strongroom.

    pip install blake3
    python check_blake3.py CHECKPOINT/data

Verify the signature over MANIFEST.json first: this holds the other files against it. Exit status: 0 all
are right, 1 some are not, 2 it was not given such a folder.
"""

import json
import sys
from pathlib import Path

from blake3 import blake3


def digest(path):
    """BLAKE3 over the digests of the file's blocks of 1 MiB."""
    whole = blake3()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            whole.update(blake3(block).digest())
    return f"blake3:{whole.hexdigest()}"


folder = Path(sys.argv[1] if len(sys.argv) == 2 else "")
if len(sys.argv) != 2 or not (folder / "MANIFEST.json").is_file():
    sys.stderr.write("usage: python check_blake3.py CHECKPOINT/data (it holds a MANIFEST.json)\n")
    sys.exit(2)
listed = {file["path"]: file for file in json.loads((folder / "MANIFEST.json").read_bytes())["files"]}
there = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*")}
there = {name: path for name, path in there.items() if path.is_symlink() or not path.is_dir()}
wrong = [f"{name}: not listed" for name in sorted(there.keys() - {*listed, "MANIFEST.json"})]
for name, record in listed.items():
    if name not in there or there[name].is_symlink():
        wrong.append(f"{name}: missing, or a link")
    elif there[name].stat().st_size != record["size"] or digest(there[name]) != record["digest"]:
        wrong.append(f"{name}: other bytes")
sys.stdout.write(("\n".join(wrong) or f"{len(listed)} files are right") + "\n")
sys.exit(bool(wrong))
