"""What stands in a checkpoint in the place of a value that has no encoding.

A front end saves what a framework and its users put together, and may prefer a checkpoint that lacks a
loss function to no checkpoint. What it then stores says so: these two, under names that every program
knows. `strongroom.resume.encodable` puts them in place, `strongroom.resume.rebuild` takes them out again.
A `Checkpointer` never puts one in by itself: what it cannot encode is an error.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from strongroom.registry import register_type

__all__ = ["LeftOut", "Simplified"]


@register_type(name="strongroom.left-out")
@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """Nothing of the value is stored.

    Attributes:
        kind: ``"class"``, ``"function"`` or ``"object"``.
        name: the qualified name of the class or function, or of the object's class. It is there to be
            read by people: nothing is imported by it.
    """

    kind: str
    name: str

    def __str__(self) -> str:
        return f"the {self.kind} {self.name}, which was left out of the checkpoint"


@register_type(name="strongroom.simplified")
@dataclass(frozen=True, slots=True, kw_only=True)
class Simplified:
    """The value's parts are stored, and its class is not.

    Attributes:
        kind: the qualified name of its class, for comparison with what a program has at that place.
        value: a plain one: the fields of a dataclass, the name of an enum's member, a configuration's dict.
    """

    kind: str
    value: Any
