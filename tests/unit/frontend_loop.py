"""A front end for a loop of a dozen lines: what `strongroom.frontend` asks of one, and nothing else.

As a program it sends itself a signal in the middle of a step::

    python frontend_loop.py ROOT SIGNAL STEP
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from strongroom.frontend import Gathered, Place, Preemption, RunSaves, RunSettings, open_run, restore_run
from strongroom.resume import JobShape, RngState, SaveIntervals, plan_resume
from strongroom.resume.following import FollowedLoader
from strongroom.resume.intervals import Moment

EPOCHS, BATCHES = 2, 4
STEPS = EPOCHS * BATCHES
JOB = JobShape(world_size=1, replicas=1, batch_size=2)


@dataclass
class Silent:
    """A voice that remembers."""

    said: list[str] = field(default_factory=list)
    warned: list[str] = field(default_factory=list)

    def info(self, text: str) -> None:
        self.said.append(text)

    def warn(self, text: str) -> None:
        self.warned.append(text)


class Loop:
    """One run in this process.

    Args:
        root: of the run; None: nothing is saved.
        draw_from: where the random streams stand.
        part: the key that its checkpoints have and no others.
        fails_with: raised while a save gathers its state.
    """

    def __init__(
        self,
        root: Path | None,
        *,
        draw_from: int = 1,
        part: str = "loop",
        fails_with: Exception | None = None,
        intervals: SaveIntervals | None = None,
        **options: Any,
    ) -> None:
        torch.manual_seed(draw_from)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 1))
        with torch.no_grad():
            for number, one in enumerate(self.model.parameters()):
                one.copy_(torch.linspace(-1, 1, one.numel()).view_as(one) + number / 9)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1)
        data = TensorDataset(torch.randn(8, 3, generator=torch.Generator().manual_seed(0)))
        self.loader: Any = DataLoader(data, batch_size=2, shuffle=True)
        self.followed = FollowedLoader(self.loader)
        self.voice = Silent()
        self.part = part
        self.fails_with = fails_with
        self.losses: list[float] = []
        self.step = 0
        self.epoch = 0
        self.in_step: Callable[[int], None] = lambda step: None
        self.saves: RunSaves | None = None
        if root is None:
            return
        settings = RunSettings.read(root, options)
        checkpointer = open_run(settings)
        plan = plan_resume(settings.resume, is_first_run=True, steps_done=0)
        template = {"model": self.model, "optimizer": self.optimizer, part: None}
        template |= dict.fromkeys(Place.PARTS)
        restored = restore_run(
            checkpointer, settings, template, plan, self.voice, written_by="this loop", own_part=part
        )
        if restored is not None:
            self.step = restored.step
            place = Place.from_state(restored.state)
            self.epoch = restored.state[part]["epoch"]
            assert place.restore([self.followed], [self.model], JOB) == ()
        self.saves = RunSaves(
            checkpointer,
            settings,
            Preemption(settings, self.voice),
            self.voice,
            intervals=intervals or SaveIntervals(every_n_steps=1),
            gather=self._gather,
            left_at=None if restored is None else restored.step,
        )
        self._preemption = self.saves._preemption

    def train(self) -> Loop:
        """To the end, or until something ends it; what is raised is raised on."""
        saves = self.saves
        if saves is None:
            self._train(lambda moment: None)
            return self
        error: BaseException | None = None
        try:
            self._preemption.begin()
            saves.begin(saves.moment(self.step, self.epoch))
            self._train(lambda is_last: saves.between_steps(saves.moment(self.step, self.epoch, **is_last)))
        except BaseException as raised:
            error = raised
            raise
        finally:
            saves.end(error)
        return self

    @property
    def weights(self) -> list[float]:
        return [value for one in self.model.parameters() for value in one.detach().reshape(-1).tolist()]

    def _train(self, between: Callable[[dict[str, bool]], Any]) -> None:
        for epoch in range(self.epoch, EPOCHS):
            self.epoch = epoch
            for (batch,) in self.loader:
                self.in_step(self.step + 1)
                loss = self.model(batch).square().sum()
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
                self.losses.append(loss.item())
                self.step += 1
                between({"is_run_end": self.step == STEPS})

    def _gather(self, moment: Moment, rng: RngState) -> Gathered:
        torch.rand(5)  # as a user's hook that is called for a save
        if self.fails_with is not None:
            raise self.fails_with
        place = Place.of([self.followed], [self.model], JOB, rng=rng)
        own = {"epoch": self.epoch}
        state = {"model": self.model, "optimizer": self.optimizer, self.part: own, **place.to_state()}
        return Gathered(state=state, metrics={"loss": self.losses[-1]} if self.losses else {}, tags=("loop",))


def main(root: str, name: str, step: str) -> None:
    """Train, and send this process a signal in the middle of a step."""
    loop = Loop(Path(root))

    def in_step(now: int) -> None:
        if now == int(step):
            os.kill(os.getpid(), signal.Signals[name])

    loop.in_step = in_step
    loop.train()


if __name__ == "__main__":
    main(*sys.argv[1:])
