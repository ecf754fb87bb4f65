"""Protection of checkpoints: the policy, and in this release sealing.

Signing, roles and the audit log are not in this release. A policy that asks for them is refused: a run
that was meant to be protected never goes on without.
"""

from strongroom_security.policy import Seal, SecurityPolicy

__all__ = ["Seal", "SecurityPolicy"]
