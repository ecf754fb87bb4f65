"""Values that no checkpoint can hold, in what a framework and its users put together: named once, left out.

What can be stored of a value, and how it comes back, `strongroom.resume` says. Here is what a user is told of
it, and the two policies.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Final, Literal

from strongroom.errors import StateEncodingError
from strongroom.frontend.settings import Unencodable
from strongroom.frontend.voice import Voice
from strongroom.keypath import Path
from strongroom.resume.losses import Loss, encodable

__all__ = ["Encoding"]

_LISTED: Final = 20


class Encoding:
    """The values of one run, as they can be stored.

    Args:
        policy: ``"warn"`` stores what can be stored and names the rest once; ``"refuse"`` is an error.
        voice: the front end's.
        advice: a sentence on what to do in this framework.
    """

    def __init__(self, policy: Unencodable, voice: Voice, *, advice: str = "") -> None:
        self._policy = policy
        self._voice = voice
        self._advice = advice
        self._told: set[str] = set()

    def of(
        self,
        value: Any,
        path: Path,
        *,
        objects: Literal["state", "omit"] = "state",
        known: Collection[str] = (),
    ) -> Any:
        """What can be stored of a value; what is lost and was not yet told of is told.

        Args:
            value: containers, tensors and whatever else a user keeps.
            path: where it stands in the state.
            objects: as `strongroom.resume.encodable` has it.
            known: as `strongroom.resume.encodable` has it.

        Raises:
            StateEncodingError: something has no encoding, and the policy is to refuse that.
        """
        found, lost = encodable(value, path, objects=objects, known=known)
        self.tell(lost)
        return found

    def tell(self, losses: Sequence[Loss]) -> None:
        """Say what is lost and was not told of yet.

        Raises:
            StateEncodingError: there is such a one, and the policy is to refuse that.
        """
        new = [loss for loss in losses if loss.place not in self._told]
        if not new:
            return
        listed = "; ".join(map(str, new[:_LISTED]))
        if len(new) > _LISTED:
            listed += f"; and {len(new) - _LISTED} more"
        advice = self._words_of_advice(sorted({loss.remedy for loss in new if loss.remedy}))
        if self._policy == "refuse":
            raise StateEncodingError(
                new[0].place,
                f"{new[0].what} has no safe encoding, and unencodable='refuse'. All such values: "
                f"{listed}.{advice}",
            )
        self._told.update(loss.place for loss in new)
        self._voice.warn(
            f"no pickle is in a checkpoint, so that these values will not come back as they are: "
            f"{listed}. What was left out stays as your program sets it up when a run is resumed.{advice}"
        )

    def _words_of_advice(self, remedies: list[str]) -> str:
        words = f" {self._advice}" if self._advice else ""
        if remedies:
            more = "..." if len(remedies) > 3 else ""
            words += f" To keep objects as they are: {', '.join(remedies[:3])}{more}."
        return words
