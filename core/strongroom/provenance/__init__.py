"""Where a checkpoint comes from: gathered, told by the user, recorded, and compared when it is restored.

Secrets are left out by `strongroom.scrubbing`. One subject each: `code`, `environment`, `host` and `job`
(facts), `collecting` (when they are gathered), `architecture` and `progress` (facts of one checkpoint),
`recording` (the document), `comparing` (what has changed), `records` (the document, read), `slsa` and
`openlineage` (told to others).
"""

from __future__ import annotations

from strongroom.provenance.comparing import Change, OnChange

__all__ = ["Change", "OnChange"]
