"""The journal of turns: a rollout outlives the worker that runs it.

Promised: what was recorded survives the death of the worker, however violent. Not promised: that it
survives the node or a stop in order, since sandboxes end with them: what a node that leaves could
not end within its time begins anew elsewhere.
"""

from prorl.journal.attempt import UNKNOWN, AttemptJournal, CallId, SupportsCallIds
from prorl.journal.folder import Journals
from prorl.journal.records import AttemptEnd, RecordedCall, Recovered, ToolAnswer

__all__ = [
    "UNKNOWN",
    "AttemptEnd",
    "AttemptJournal",
    "CallId",
    "Journals",
    "RecordedCall",
    "Recovered",
    "SupportsCallIds",
    "ToolAnswer",
]
