"""Protection of checkpoints: in this release, the policy file and nothing that it could switch on.

Sealing, signing, roles and the audit log are not in this release. A policy that asks for them
is refused: a run that was meant to be protected never goes on without.
"""

from strongroom_security.policy import SecurityPolicy

__all__ = ["SecurityPolicy"]
