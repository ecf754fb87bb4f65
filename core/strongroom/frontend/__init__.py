"""What every front end is made of: one run's settings, saves, resume and end, in nobody's framework's terms.

`settings` reads what a user may set in all of them; `opening` makes a Checkpointer of it; `resuming` takes up
the newest checkpoint; `place` is where a run stands besides its weights; `saves` saves between steps and
answers whoever tells the run to stop, by `preempting`; `encoding` names what no checkpoint can hold,
`escapes` says what becomes of what else writes state, `figures` what saves cost, `voice` how a front end
speaks, `replacing` how it comes to its framework's inner places, and `releasing` puts on record what leaves.

A front end translates: its framework's events into these terms, and what is said here into its framework's.
"""

from __future__ import annotations

from strongroom.frontend.encoding import Encoding
from strongroom.frontend.escapes import EscapePolicy, check_escapes, policy_seals
from strongroom.frontend.figures import Figures
from strongroom.frontend.opening import open_run, provenance_of
from strongroom.frontend.place import Place, loader_generators
from strongroom.frontend.preempting import Preempted, Preemption
from strongroom.frontend.releasing import on_record_as_export
from strongroom.frontend.replacing import Replace, Replacements, replace_for_good
from strongroom.frontend.resuming import restore_run
from strongroom.frontend.saves import Gathered, RunSaves
from strongroom.frontend.settings import DEFAULTS, RunOptions, RunSettings, check_flags, check_interval
from strongroom.frontend.voice import LoggedVoice, Voice

__all__ = [
    "DEFAULTS",
    "Encoding",
    "EscapePolicy",
    "Figures",
    "Gathered",
    "LoggedVoice",
    "Place",
    "Preempted",
    "Preemption",
    "Replace",
    "Replacements",
    "RunOptions",
    "RunSaves",
    "RunSettings",
    "Voice",
    "check_escapes",
    "check_flags",
    "check_interval",
    "loader_generators",
    "on_record_as_export",
    "open_run",
    "policy_seals",
    "provenance_of",
    "replace_for_good",
    "restore_run",
]
