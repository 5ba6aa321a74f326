"""The journal of turns: a rollout outlives the worker that runs it.

`frames` is the file format, `records` what it holds, `attempt` what an agent asks and tells,
`folder` all journals of one worker, from a row's arrival to its commit.

Promised: what was recorded survives the death of the worker, however violent, and goes with the
rollout when its node leaves in order. Not promised: that it survives the loss of the node, whose
sandboxes are lost with it.
"""

from prorl.journal.attempt import UNKNOWN, AttemptJournal, CallId, ForkOrigin, Marks
from prorl.journal.folder import Journals, handed_path
from prorl.journal.records import Answer, Ended, Moved, Said
from prorl.journal.recovered import Recovered

__all__ = [
    "UNKNOWN",
    "Answer",
    "AttemptJournal",
    "CallId",
    "Ended",
    "ForkOrigin",
    "Journals",
    "Marks",
    "Moved",
    "Recovered",
    "Said",
    "handed_path",
]
