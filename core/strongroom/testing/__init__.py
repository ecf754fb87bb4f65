"""Tools to test a store, or what stands on one: for this project and for everyone else's.

- `StoreConformance`: what every store must do, as tests to subclass.
- `FaultyStore`, `every_fault`: fail the nth operation of any store.
- `FaultyCalls`: fail the nth system call of a local store.
- `SimDisk`: every disk that a power cut could leave behind a local store.

Only `StoreConformance` needs pytest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from strongroom.testing.faults import Fault, FaultyStore, Operation, every_fault
from strongroom.testing.faultycalls import FaultyCalls
from strongroom.testing.simdisk import CrashState, SimDisk

if TYPE_CHECKING:
    from strongroom.testing.conformance import StoreConformance

__all__ = [
    "CrashState",
    "Fault",
    "FaultyCalls",
    "FaultyStore",
    "Operation",
    "SimDisk",
    "StoreConformance",
    "every_fault",
]


def __getattr__(name: str) -> Any:
    if name == "StoreConformance":
        from strongroom.testing.conformance import StoreConformance

        return StoreConformance
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
