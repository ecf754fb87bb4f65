"""Train a model twice, kill one of the runs with SIGKILL, and prove that both end with the same weights.

``python demo.py`` needs nothing else. The training is `train.py`, which knows nothing of kills; here it is
started, killed, started again by the very same command, and compared.
"""

from __future__ import annotations

import argparse
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn

from account import Account, Watch
from comparison import differences
from rich.console import Console
from runs import Batch, OnDisk, Run, Start, step_of

POLL_S = 0.02
SAVE_POLL_S = 0.001
"""A save of this small model takes some milliseconds."""

SILENCE_S = 180.0
"""A training that says nothing for so long is stuck, even on a machine that is very busy."""

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class TrainingError(Exception):
    """The training ended with an error of its own, or is stuck."""

    def __init__(self, reason: str, log: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.log = log


@dataclass(frozen=True, kw_only=True)
class Strike:
    """When to kill: once ``after_step`` steps are done, inside a save or somewhere inside a step.

    Attributes:
        after_step: steps that are done before.
        moment: how far into the step after that, from 0 to 1.
        is_in_save: wait for the next save, and kill inside it.
    """

    after_step: int
    moment: float
    is_in_save: bool


def draw_strikes(*, seed: int, steps: int, kills: int) -> list[Strike]:
    """A random moment in each of ``kills`` equal stretches of the run, one of them inside a save."""
    draw = random.Random(seed)
    # The last stretch may have no save left to be killed in.
    in_save = draw.randrange(max(1, kills - 1))
    strikes = []
    for number in range(kills):
        first, end = (1 + (steps - 2) * part // kills for part in (number, number + 1))
        after_step = draw.randrange(first, end)
        strikes.append(Strike(after_step=after_step, moment=draw.random(), is_in_save=number == in_save))
    return strikes


def train(run: Run, strike: Strike | None, watch: Watch, on_first_batch: Callable[[Start], None]) -> bool:
    """Start the training once, and say whether it was killed; otherwise it has ended by itself.

    Raises:
        TrainingError: it ended with an error, or is stuck.
    """
    torn_before = set(run.on_disk().torn)
    is_struck = False
    with run.start() as start:
        while start.exit_status is None and not is_struck:
            is_first = not start.batches
            start.read()
            watch.show(start)
            if start.batches and is_first:
                on_first_batch(start)
            if time.monotonic() - start.heard_s > SILENCE_S:
                raise TrainingError(f"the training said nothing for {SILENCE_S:.0f} s", start.complaint())
            if strike is None or not start.batches or start.batches[-1].step < strike.after_step:
                time.sleep(POLL_S)
            elif strike.is_in_save:
                is_struck = is_frozen_inside_a_save(run, start, torn_before)
                time.sleep(0 if is_struck else SAVE_POLL_S)
            else:
                time.sleep(strike.moment * start.seconds_per_step())
                is_struck = True
    # Leaving the block has killed the process, if there still was one.
    if is_struck and start.exit_status == -signal.SIGKILL:
        return True
    if start.exit_status != 0:
        raise TrainingError(f"the training ended with exit status {start.exit_status}", start.complaint())
    return False


def is_frozen_inside_a_save(run: Run, start: Start, torn_before: set[Path]) -> bool:
    """Whether the process now stands still with a save half-written; otherwise it goes on."""
    if torn_before.issuperset(run.on_disk().torn):
        return False
    start.freeze()
    # The save may have been committed between the look and the standstill; from here on nothing moves.
    if torn_before.issuperset(run.on_disk().torn):
        start.thaw()
        return False
    return True


def train_undisturbed(run: Run, account: Account) -> None:
    began_s = time.monotonic()
    with account.watch(run.steps) as watch:
        train(run, None, watch, account.begins)
    account.ends(run.batches, time.monotonic() - began_s)


def train_under_fire(run: Run, strikes: Sequence[Strike], account: Account) -> None:
    began_s = time.monotonic()
    steps_done = 0

    def on_first_batch(start: Start) -> None:
        if len(run.starts) == 1:
            account.begins(start)
        else:
            account.begins_again(start, lost=steps_done - start.batches[0].step)

    for strike in (*strikes, None):
        torn_before = run.on_disk().torn
        with account.watch(run.steps) as watch:
            is_killed = train(run, strike, watch, on_first_batch)
        if not is_killed:
            if strike is not None:
                account.escaped()
            break
        disk, killed = run.on_disk(), run.starts[-1]
        torn = [folder for folder in disk.torn if folder not in torn_before]
        account.killed(killed, disk, torn)
        steps_done = furthest(killed.batches, disk, torn)
    account.ends(run.batches, time.monotonic() - began_s)


def furthest(batches: Sequence[Batch], disk: OnDisk, torn: Iterable[Path]) -> int:
    """The steps that a killed training had done, by what it printed and, if it had saved yet, saved."""
    return max([batches[-1].step, *disk.whole, *map(step_of, torn)])


def verify(root: Path) -> str:
    """What ``strongroom verify`` complains of; empty where everything is whole."""
    command = [sys.executable, "-m", "strongroom_cli", "verify", str(root), "--all"]
    result = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    return "" if result.returncode == 0 else result.stdout + result.stderr


def perform(options: argparse.Namespace, account: Account, temporary: Path) -> bool:
    """Both runs and their comparison; whether it holds."""
    steps, kills, seed = options.steps, options.kills, options.seed
    undisturbed, killed = (
        Run((options.keep or temporary) / name, steps=steps, workers=options.workers, temporary=temporary)
        for name in ("undisturbed", "killed")
    )
    account.opens(steps=steps, kills=kills, seed=seed)
    account.chapter(1, "Undisturbed")
    train_undisturbed(undisturbed, account)
    account.chapter(2, "Killed")
    train_under_fire(killed, draw_strikes(seed=seed, steps=steps, kills=kills), account)
    account.chapter(3, "Compared")
    digests = undisturbed.digest(), killed.digest()
    found = differences(undisturbed.batches, killed.batches, weights=digests)
    again = len(killed.batches) - len(undisturbed.batches)
    account.compares(undisturbed=digests[0], killed=digests[1])
    account.concludes(found, batches=len(undisturbed.batches), again=again)
    complaint = verify(killed.root)
    account.verified(complaint)
    return not found and not complaint


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, help="draws the moments of the kills (a random one)")
    parser.add_argument("--kills", type=int, default=3, help="how many (%(default)s)")
    parser.add_argument("--steps", type=int, default=72, help="of the optimizer, in all (%(default)s)")
    parser.add_argument("--workers", type=int, default=2, help="processes that load data (%(default)s)")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep both runs here; a new or empty folder")
    options = parser.parse_args(arguments)
    if options.kills < 0:
        parser.error(f"--kills: expected 0 or more, got {options.kills}")
    fewest = max(10, 5 * options.kills)
    if options.steps < fewest:
        parser.error(f"--steps: {options.kills} kills need {fewest} steps or more, got {options.steps}")
    if options.keep is not None and options.keep.exists() and any(options.keep.iterdir()):
        parser.error(f"--keep: {options.keep} is not empty, and both runs have to begin anew")
    if options.seed is None:
        options.seed = random.SystemRandom().randrange(100_000)
    return options


def interrupt(number: int, frame: FrameType | None) -> NoReturn:
    """End after Ctrl-C and its like; whoever presses it twice does not stop the cleaning up."""
    for ending in ENDING:
        signal.signal(ending, signal.SIG_IGN)
    raise KeyboardInterrupt


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    account = Account(Console(highlight=False))
    for number in ENDING:
        signal.signal(number, interrupt)
    try:
        with tempfile.TemporaryDirectory(prefix="strongroom-") as temporary:
            is_proved = perform(options, account, Path(temporary))
    except TrainingError as error:
        account.fails(error.reason, error.log)
        return 1
    except KeyboardInterrupt:
        account.fails("interrupted")
        return 130
    if options.keep is None:
        advice = "To keep both runs, and look at what the kills leave behind:"
        commands = [f"python {sys.argv[0]} --keep DIR"]
    else:
        advice = "Look at what the kills left behind:"
        root = options.keep / "killed" / "checkpoints"
        commands = [f"strongroom {verb} {root}" for verb in ("ls", "show", "verify --all")]
    account.closes(is_proved=is_proved, advice=advice, commands=commands)
    return 0 if is_proved else 1


if __name__ == "__main__":
    sys.exit(main())
