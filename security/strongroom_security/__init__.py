"""Protection of checkpoints: the policy, sealing, signing, roles, and what a restore refuses.

The audit log is not in this release. A policy that asks for it is refused: a run that was meant to be
protected never goes on without.
"""

from strongroom_security.policy import SecurityPolicy
from strongroom_security.requirements import (
    AllOf,
    AnyOf,
    Requirement,
    RequireSigner,
    Threshold,
    UnsafeAllowUnsigned,
)
from strongroom_security.role import ActAs
from strongroom_security.seal import Seal
from strongroom_security.sign import Sign
from strongroom_security.verify import Verify

__all__ = [
    "ActAs",
    "AllOf",
    "AnyOf",
    "RequireSigner",
    "Requirement",
    "Seal",
    "SecurityPolicy",
    "Sign",
    "Threshold",
    "UnsafeAllowUnsigned",
    "Verify",
]
