"""The control protocol: events up, commands down, over one `Channel` (path `control`) per process.

What a row carries is a record: `workers.py` has what every worker says and hears, and what RUN does
about model servers, `requests.py` and `commands.py` what the store does. `rows.py`
packs rows for the wire and reads them. Tokens never travel here.

An event carries a `seq` of its sender, dense from 1 per connection. The gateway answers a request
with `reply` (re = the request's seq, `code` empty or an error code); what becomes of an event is
told by what follows from it. After a lost connection a worker dials again and says
`hello` with the attempts it still holds; requests without a reply are sent again (all are
idempotent). The gateway treats a closed control channel as that worker's death at once.

Who holds an attempt: the gateway keeps a set of workers per current attempt. INIT enters at lease;
RUN's `started` replaces INIT; EVAL's `started` adds EVAL (RUN keeps its copy until the commit is
acked); the store enters at `reserve`. A worker leaves when it dies or says `released`. When the set
becomes empty the attempt is lost and the rollout is leased again with attempt + 1; if the last
worker was leaving (`drain`, `leaving`), nobody is charged.

Both ends compare `SCHEMA_VERSION` at `hello`, before anything else of it is read. A payload that is
not what its kind says raises SchemaError where it is read; a request is then answered `invalid`.
"""

from collections.abc import Mapping

from prorl.control.commands import GroupComplete as GroupComplete
from prorl.control.commands import GroupEventRow as GroupEventRow
from prorl.control.commands import Rows as Rows
from prorl.control.commands import RunNews as RunNews
from prorl.control.commands import Stuck as Stuck
from prorl.control.commands import TaskRow as TaskRow
from prorl.control.commands import Terminal as Terminal
from prorl.control.commands import Unpublished as Unpublished
from prorl.control.payload import Count as Count
from prorl.control.payload import Kind as Kind
from prorl.control.payload import Payload as Payload
from prorl.control.payload import ReplyT as ReplyT
from prorl.control.payload import Request as Request
from prorl.control.payload import Version as Version
from prorl.control.requests import CommitCursor as CommitCursor
from prorl.control.requests import CommitPart as CommitPart
from prorl.control.requests import Committed as Committed
from prorl.control.requests import CommittedRollout as CommittedRollout
from prorl.control.requests import Decision as Decision
from prorl.control.requests import Delivered as Delivered
from prorl.control.requests import Disowned as Disowned
from prorl.control.requests import Done as Done
from prorl.control.requests import HandedOut as HandedOut
from prorl.control.requests import Handout as Handout
from prorl.control.requests import KeptGroup as KeptGroup
from prorl.control.requests import PartFile as PartFile
from prorl.control.requests import PartPublished as PartPublished
from prorl.control.requests import Problem as Problem
from prorl.control.requests import Propose as Propose
from prorl.control.requests import Refusal as Refusal
from prorl.control.requests import RefusalReason as RefusalReason
from prorl.control.requests import Reserve as Reserve
from prorl.control.requests import Reserved as Reserved
from prorl.control.requests import TrajectorySummary as TrajectorySummary
from prorl.control.rows import ControlRow as ControlRow
from prorl.control.rows import from_batch as from_batch
from prorl.control.rows import to_batch as to_batch
from prorl.control.workers import Assigned as Assigned
from prorl.control.workers import BackendsTold as BackendsTold
from prorl.control.workers import Cancel as Cancel
from prorl.control.workers import Claim as Claim
from prorl.control.workers import Drain as Drain
from prorl.control.workers import Endpoints as Endpoints
from prorl.control.workers import Failed as Failed
from prorl.control.workers import Failover as Failover
from prorl.control.workers import Hello as Hello
from prorl.control.workers import Leaving as Leaving
from prorl.control.workers import Paused as Paused
from prorl.control.workers import Progress as Progress
from prorl.control.workers import Released as Released
from prorl.control.workers import Served as Served
from prorl.control.workers import Started as Started
from prorl.control.workers import Stats as Stats
from prorl.control.workers import VersionPublished as VersionPublished
from prorl.control.workers import Welcome as Welcome

REPLIES: tuple[type[Payload], ...] = (
    *(Done, Problem, Reserved, Committed, HandedOut),
    Assigned,
)

PAYLOADS: Mapping[Kind, type[Payload]] = {
    payload.kind: payload
    for payload in (
        *(Hello, Started, Progress, Failed, Released, Leaving, Stats),
        *(Reserve, CommitPart, PartPublished, Disowned, Propose, Handout, CommitCursor, Failover),
        *(Welcome, Endpoints, Cancel, Drain),
        *(VersionPublished, Paused, BackendsTold),
        *(RunNews, Rows, Terminal, GroupComplete, Stuck),
    )
}
"""The record of each kind; a `reply` carries what its request asks for, or `Problem`."""
