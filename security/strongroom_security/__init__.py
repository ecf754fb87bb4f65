"""Protection of checkpoints: the policy, sealing, signing, and what a restore refuses.

Roles and the audit log are not in this release. A policy that asks for them is refused: a run that was
meant to be protected never goes on without.
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
from strongroom_security.seal import Seal
from strongroom_security.sign import Sign
from strongroom_security.verify import Verify

__all__ = [
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
