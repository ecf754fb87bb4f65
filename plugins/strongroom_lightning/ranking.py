"""What ``monitor`` ranks, told in the words of Lightning's attributes.

Which is better and what stays is `strongroom.ranking`'s to say. Here a metric is measured, once on the
weights that it belongs to; what has committed since is found out; and the names are made by which
``ckpt_path`` takes the best.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn

from strongroom import Checkpointer, KeepLast
from strongroom.errors import ConfigError
from strongroom.handle import SaveHandle
from strongroom.manifest import MAX_BEST
from strongroom.ranking import KeepRanked, RankMode, Scores, as_score, best_first, check_rank_mode
from strongroom.retention import RetentionPolicy
from strongroom_lightning.uri import CheckpointUri

__all__ = ["STATE_KEY", "Measured", "Ranking", "RankingRule", "best_of", "steps_ranked_in"]

STATE_KEY: Final = "strongroom_ranking"
"""Where a checkpoint in Lightning's form carries the ranking: the same place whatever the arguments, so that
a run whose interval or metric is changed does not forget what was best."""

_REMEMBERED: Final = 256
"""How many scores a checkpoint carries where all are kept: the callback's state must stay small."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankingRule:
    """What is ranked, and how many stay.

    Attributes:
        monitor: the metric; None ranks nothing.
        mode: whether low or high is good.
        best: how many of the best stay; None: all that are ranked.
        newest: how many of the newest stay; None: all, whatever is ranked.
        save_top_k: as it was given.
    """

    monitor: str | None
    mode: RankMode
    save_top_k: int | None
    best: int | None
    newest: int | None

    @classmethod
    def of(cls, *, monitor: Any, mode: str, save_top_k: Any, keep: int | None) -> RankingRule:
        """Read `ModelCheckpoint`'s arguments, and ours beside them.

        Raises:
            ConfigError: a value that cannot work, or two that contradict each other.
        """
        if monitor is not None and not (isinstance(monitor, str) and monitor):
            raise ConfigError(f"monitor must be the name of a logged metric, or None; got {monitor!r}")
        if save_top_k is not None and (type(save_top_k) is not int or save_top_k < -1):
            raise ConfigError(
                f"save_top_k must be -1 (all), 0 (none), or how many of the best stay; got {save_top_k!r}"
            )
        mode = check_rank_mode(mode)
        if keep is not None and (type(keep) is not int or keep < 1):
            raise ConfigError(f"keep must be how many of the newest stay, at least 1, or None; got {keep!r}")
        if monitor is None:
            if save_top_k not in {None, -1, 0, 1}:
                raise ConfigError(
                    f"save_top_k={save_top_k} without monitor: there is nothing to rank by. Give monitor= "
                    f"the name of a logged metric; or keep={save_top_k}, for the newest {save_top_k}"
                )
            if save_top_k == -1 and keep is not None:
                raise ConfigError(f"save_top_k=-1 keeps all, and keep={keep} does not; give one of them")
            newest = keep if keep is not None else 1 if save_top_k in {0, 1} else None
            return cls(monitor=None, mode=mode, save_top_k=save_top_k, best=0, newest=newest)
        best = 1 if save_top_k is None else save_top_k
        return cls(
            monitor=monitor,
            mode=mode,
            save_top_k=save_top_k,
            best=None if best == -1 else best,
            newest=keep if keep is not None else None if best == -1 else 1,
        )


@dataclass(frozen=True, slots=True)
class Measured:
    """What was found of the metric at one moment.

    Attributes:
        score: its value, where it was measured on the weights as they are.
        is_missing: nothing of that name was logged in all of the run.
        problem: why its value is none to rank by.
    """

    score: float | None = None
    is_missing: bool = False
    problem: str = ""

    def to_word(self) -> list[Any]:
        """What one rank tells the others."""
        return [None if self.score is None else self.score.hex(), self.is_missing, self.problem]

    @classmethod
    def from_word(cls, word: Any) -> Measured:
        score, is_missing, problem = word
        return cls(None if score is None else float.fromhex(score), is_missing, problem)


class Ranking:
    """The ranking of one run.

    Args:
        rule: what is ranked.
        root: the run's.

    Attributes:
        is_behind: since the last ranked save one was due that had no score.
    """

    def __init__(self, rule: RankingRule, root: str) -> None:
        self.rule = rule
        self._root = root
        self._scores = Scores(rule.monitor or "", rule.mode)
        self._begun: dict[int, SaveHandle | None] = {}
        self._newest: int | None = None
        self._current: float | None = None
        self._inherited = ""
        self._seen: Any = None
        self.is_behind = False

    def __getstate__(self) -> dict[str, Any]:
        # A save that is under way is this process's; what has committed is known to any other too.
        self._settle()
        return {**self.__dict__, "_begun": dict.fromkeys(self._begun), "_seen": None}

    @property
    def policy(self) -> RetentionPolicy | None:
        """What stays in the run's root; None: everything."""
        if self.rule.newest is None:
            return None
        if self.rule.monitor is None:
            return KeepLast(count=self.rule.newest)
        return KeepRanked(newest=self.rule.newest, best=self.rule.best, scores=self._scores)

    # ------------------------------------------------------------------------------------------- a fit

    def begin_anew(self) -> None:
        """A run begins, or is about to be taken up: what was ranked before is of another one."""
        self._scores.replace({})
        self._begun.clear()
        self._newest = self._current = self._seen = None
        self._inherited = ""
        self.is_behind = False

    def stand_on(self, step: int) -> None:
        """The run has been taken up from this step of its root."""
        self._newest = step

    def pass_over(self, metrics: Mapping[str, Any]) -> None:
        """What is logged now belongs to weights that are gone."""
        if self.rule.monitor is not None:
            self._seen = metrics.get(self.rule.monitor)

    def measure(self, metrics: Mapping[str, Any]) -> Measured:
        """Take the metric up; a value that was taken up before, or passed over, is not measured again."""
        monitor = self.rule.monitor
        if monitor is None:
            return Measured()
        value = metrics.get(monitor)
        if value is None:
            # Lightning forgets what was logged before a resume; that it was is known from the checkpoint.
            return Measured(is_missing=self._current is None)
        if value is self._seen:
            return Measured()
        self._seen = value
        try:
            return Measured(as_score(float(value), self.rule.mode))
        except (TypeError, ValueError, RuntimeError) as error:
            return Measured(
                problem=f"monitor={monitor!r} is no single number ({error}), and nothing can be ranked "
                "by it; log one"
            )

    def place(self, step: int) -> int | None:
        """Which of the best a step is, from 1, its own save's outcome aside; None: none that stays."""
        order = self._scores.best_first()[: self.rule.best]
        return order.index(step) + 1 if step in order else None

    def begin(self, step: int, score: float | None, *, is_owed: bool) -> None:
        """A save is about to be made. What the callback's state says from here on is part of it.

        Args:
            is_owed: without a score, it leaves a ranked save to be made.
        """
        self._note_committed()
        self._begun[step] = None
        if self.rule.monitor is None or self.rule.best == 0:
            return
        if score is None:
            self.is_behind = self.is_behind or is_owed
            return
        self._scores.put(step, score)
        self._current = score
        self.is_behind = False

    def give_up(self, step: int) -> None:
        """It was not made."""
        self._begun.pop(step, None)
        if step in self._scores.by_step():
            self._scores.drop(step)
            self.is_behind = True

    def follow(self, step: int, handle: SaveHandle) -> None:
        """It is under way."""
        self._begun[step] = handle

    def _settle(self) -> None:
        """Find out what has become of the saves that were under way."""
        self._note_committed()
        for step, handle in list(self._begun.items()):
            if handle is not None and handle.done():
                self.give_up(step)

    def _note_committed(self) -> None:
        """Let go of those that have committed: in a long run nobody may ever ask."""
        for step, handle in list(self._begun.items()):
            if handle is not None and handle.done() and not handle.has_failed:
                del self._begun[step]
                self._newest = step

    # ----------------------------------------------------------------------------- Lightning's attributes

    def best_steps(self) -> list[int]:
        """The committed steps that are kept as the best, the best first."""
        self._settle()
        return self._scores.best_first(without=self._begun)[: self.rule.best]

    def named_best(self) -> list[int]:
        """The steps that stay as the best, for whoever removes checkpoints from outside; the best first.

        Where all are to stay, that is for the one who removes to say, and the best is the best all the same.
        """
        if self.rule.monitor is None:
            return []
        steps = self._scores.best_first()[: 1 if self.rule.best is None else self.rule.best]
        return [*steps, *sorted(self._scores.others.difference(steps))][:MAX_BEST]

    @property
    def best_k_models(self) -> dict[str, torch.Tensor]:
        by_step = self._scores.by_step()
        return {self.path(step): torch.tensor(by_step[step]) for step in self.best_steps() if step in by_step}

    @property
    def best_model_path(self) -> str:
        if self.rule.monitor is None:
            return "" if self.rule.save_top_k == 0 else self.last_model_path
        return next(iter(self.best_k_models), self._inherited)

    @property
    def best_model_score(self) -> torch.Tensor | None:
        return next(iter(self.best_k_models.values()), None)

    @property
    def kth_best_model_path(self) -> str:
        models = list(self.best_k_models)
        return models[-1] if models and (self.rule.best is None or len(models) == self.rule.best) else ""

    @property
    def kth_value(self) -> torch.Tensor:
        path, models = self.kth_best_model_path, self.best_k_models
        worst = float("inf") if self.rule.mode == "min" else float("-inf")
        return models.get(path, torch.tensor(worst))

    @property
    def current_score(self) -> torch.Tensor | None:
        return None if self._current is None else torch.tensor(self._current)

    @property
    def last_model_path(self) -> str:
        self._settle()
        return "" if self._newest is None else self.path(self._newest)

    def path(self, step: int) -> str:
        """The name by which ``ckpt_path`` takes a step of the run's root."""
        return str(CheckpointUri(root=self._root, step=step))

    # --------------------------------------------------------------------------------------- its own state

    def state_dict(self) -> dict[str, Any]:
        """Plain values, a few bytes a ranked checkpoint; empty where nothing is ranked."""
        if self.rule.monitor is None:
            return {}
        by_step = self._scores.by_step()
        stay = self._scores.best_first()[: _REMEMBERED if self.rule.best is None else self.rule.best]
        return {
            "dirpath": self._root,
            "monitor": self.rule.monitor,
            "mode": self.rule.mode,
            "scores": {step: by_step[step] for step in stay},
            "others": sorted(self._scores.others),
            "current_score": self._current,
            "is_behind": self.is_behind,
        }

    def load_state_dict(
        self, state: Mapping[str, Any], *, is_own: bool, steps: Callable[[], Collection[int]]
    ) -> None:
        """Go on with what a checkpoint knew.

        Args:
            is_own: the checkpoint is of this run's root, whatever that was called then.
            steps: asks which steps there are.
        """
        scores = {int(step): float(score) for step, score in state["scores"].items()}
        if not is_own:
            found = best_first(scores, check_rank_mode(state["mode"]))
            if found:
                self._inherited = str(CheckpointUri(root=state["dirpath"], step=found[0]))
            return
        there = frozenset(steps())
        others = there.intersection(state["others"])
        if (state["monitor"], state["mode"]) == (self.rule.monitor, self.rule.mode):
            self._scores.replace({step: scores[step] for step in scores if step in there}, others=others)
            self._current = state["current_score"]
            self.is_behind = bool(state["is_behind"])
            return
        others = others.union(there.intersection(scores))
        self._scores.replace({}, others=others)
        self.is_behind = True
        rank_zero_warn(
            f"Strongroom: {self._root} was ranked by {state['monitor']} ({state['mode']}) until now, and is "
            f"from here on by {self.rule.monitor} ({self.rule.mode}); what was best by the former "
            f"({', '.join(f'step {step}' for step in sorted(others)) or 'nothing'}) stays until you remove it"
        )


def best_of(reader: Checkpointer, *, accept_older: bool) -> int | None:
    """The best step of a root by what its newest checkpoint knows; None: nothing is ranked, or there is none.

    Every rank of a job calls this.
    """
    restored = reader.restore({"lightning": {}}, only="lightning", accept_older=accept_older)
    if restored is None:
        return None
    there = {checkpoint.step for checkpoint in reader.checkpoints()}
    return next(
        (step for step in steps_ranked_in(restored.state.get("lightning", {})) if step in there), None
    )


def steps_ranked_in(checkpoint: Mapping[str, Any]) -> list[int]:
    """The steps that a checkpoint knows as ranked, the best first; some may be gone since it was saved."""
    state = checkpoint.get(STATE_KEY)
    if not state:
        return []
    scores = {int(step): float(score) for step, score in state["scores"].items()}
    return list(best_first(scores, check_rank_mode(state["mode"])))
