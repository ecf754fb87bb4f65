"""A program that Composer's launcher, or torchrun, starts on two ranks: it says what came of its training."""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
warnings.simplefilter("ignore")

import torch  # noqa: E402 - what is said while it is imported is no finding
from composer.utils import dist  # noqa: E402 - as above
from composer_runs import Drawing, train  # noqa: E402 - the folder must be known first

if __name__ == "__main__":
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    dist.initialize_dist("cpu")
    whole = train(None, callbacks=(Drawing,))
    train(folder / "run", until=8, callbacks=(Drawing,), checkpoint={"save_interval": "8ba"})
    resumed = train(folder / "run", seed=1000, callbacks=(Drawing,), checkpoint={"save_interval": "1ep"})
    resumed.ends_like(whole)
    found = {"left": len(resumed.losses), "node_rank": os.environ.get("NODE_RANK")}
    (folder / f"rank{dist.get_global_rank()}.json").write_text(json.dumps(found))
