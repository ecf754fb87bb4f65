"""How ``iter(loader)`` is led to somebody else, while the loader stays the object that it was.

Its class becomes a subclass of its own, of the same name, on this one instance: whoever has it, or asks what
it is, sees no other. Any object will do whose class can be changed so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from strongroom.errors import ConfigError

__all__ = ["as_it_was", "is_led_to", "lead", "let_go"]

_SEAT: Final = "_strongroom_iterate"

Iterate = Callable[[], Iterator[Any]]


def lead(loader: Any, iterate: Iterate) -> None:
    """Let ``iter(loader)`` be ``iterate()``.

    Raises:
        ConfigError: somebody else has led it away already; or it is an object whose iteration cannot be led,
            such as a list.
    """
    if getattr(loader, _SEAT, None) is not None:
        raise ConfigError("this loader is followed already, by another run's front end; give each its own")
    kind = type(loader)
    members = {
        "__iter__": lambda self: getattr(self, _SEAT)(),
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
    }
    try:
        led = type(kind.__name__, (kind,), members)
        _set_class(loader, led)
        loader.__dict__[_SEAT] = iterate
    except (TypeError, AttributeError) as error:
        raise ConfigError(
            f"the training data are a {kind.__qualname__}, of which nobody can see how far it was read "
            f"({error}); give a torch DataLoader, or an object of a class of your own with __iter__"
        ) from error


def is_led_to(loader: Any, iterate: Iterate) -> bool:
    """Whether ``iter(loader)`` still is ``iterate()``."""
    return bool(getattr(loader, _SEAT, None) == iterate)


def let_go(loader: Any, kind: type) -> None:
    """Let the loader be of its own class again."""
    loader.__dict__.pop(_SEAT, None)
    _set_class(loader, kind)


@contextmanager
def as_it_was(loader: Any, kind: type) -> Iterator[None]:
    """For a moment the loader has its own class: some functions ask what it is."""
    led = type(loader)
    _set_class(loader, kind)
    try:
        yield
    finally:
        _set_class(loader, led)


def _set_class(loader: Any, kind: type) -> None:
    # Some loaders show another class than they have; this is how the real one is set.
    object.__dict__["__class__"].__set__(loader, kind)
