"""Roles: what each may do, the policies that hold them to it, and what a client refuses by itself.

`definitions` says what the roles are, as plain data. `documents` and `guardrails` turn that into the
documents of AWS, and `rendering` into files; `comparing` and `looking` hold what stands against them.
`acting` and `credentials` fill the core's seam for ``[role]`` of a policy; `grants` is how somebody becomes
``break-glass``.
"""

from strongroom_security.roles.definitions import ROLES, Definition, Rights, definition

__all__ = ["ROLES", "Definition", "Rights", "definition"]
