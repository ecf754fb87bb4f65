"""Protection of checkpoints: policy, sealing, signing, roles, the audit log, and what a restore refuses."""

from strongroom_security.audit import Audit
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
    "Audit",
    "RequireSigner",
    "Requirement",
    "Seal",
    "SecurityPolicy",
    "Sign",
    "Threshold",
    "UnsafeAllowUnsigned",
    "Verify",
]
