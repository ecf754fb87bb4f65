"""A rotation in a process of its own, which tells of each checkpoint and may be killed."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from sealed_roots import CountedKey, commits_of

from strongroom.stores.open import open_store
from strongroom_security.fields import Context
from strongroom_security.rotation import Progress, SetRecipients, rotate
from strongroom_security.secret import Secret


class SlowKey(CountedKey):
    """Takes as long as the network does."""

    pause_s = 0.01

    def unwrap(self, wrapped: bytes, context: Context, *, within_s: float) -> Secret:
        time.sleep(self.pause_s)
        return super().unwrap(wrapped, context, within_s=within_s)


def tell(progress: Progress) -> None:
    sys.stdout.write(f"{progress.done}\n")
    sys.stdout.flush()


def main(root: Path, old: str, new: str, since_ms: int, workers: int) -> None:
    store = open_store(root)
    rotate(
        store,
        commits_of(store),
        SetRecipients(recipients=(SlowKey(new),), new_checkpoint_key=True, since_ms=since_ms),
        identities=[SlowKey(old)],
        remove_old=True,
        workers=workers,
        on_progress=tell,
    )


if __name__ == "__main__":
    SlowKey.pause_s = float(sys.argv[6])
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))
