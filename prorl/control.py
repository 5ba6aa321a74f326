"""The control protocol: events up, commands down, over one `Channel` (path `control`) per process.

Tokens never travel here.

An event carries a `seq` of its sender, dense from 1 per connection. The gateway answers `ack` (re =
highest seq whose effect is durable) or, to a request, `reply` (re = the request's seq, `code` empty
or an error code, `payload` the answer). After a lost connection a worker dials again and says
`hello` with the attempts it still holds; requests without a reply are sent again (all are
idempotent). The gateway treats a closed control channel as that worker's death at once.

Who holds an attempt: the gateway keeps a set of workers per current attempt. INIT enters at lease;
RUN's `started` replaces INIT; EVAL's `started` adds EVAL (RUN keeps its copy until the commit is
acked); the store enters at `reserve`. A worker leaves when it dies or says `released`. When the set
becomes empty the attempt is lost and the rollout is leased again with attempt + 1.

Up, from workers
    hello      payload {role, worker, node, pid, location, slots, schema_version, held: [[run_id, rollout_id, attempt], ...]}
    started    (run, rollout, attempt, stage): this worker took the row
    progress   (run, rollout, attempt, stage) payload {turn, tokens}: a heartbeat from the work itself
    failed     (run, rollout, attempt, stage, code) payload {message}: the attempt ended without a valid row
    released   (run, rollout, attempt, stage): no longer held, nothing to report
    stats      (stage) payload {slots, busy, queued, done, failed, busy_s, tokens}: each half second
Up, from the store (requests)
    reserve    payload {attempts: [[run_id, rollout_id, attempt], ...]} -> {granted: [...], refused: [[.., reason], ...]};
               reason `fenced` (superseded, terminal) or `committed` (this very attempt is durable:
               ack it)
    commit     (run) payload {part, files: [{table, path, rows, bytes, sha256}], rollouts: [{rollout_id, attempt, reward, failure_class,
               failure_code, min_version, max_version, num_turns, num_tokens, num_sampled}],
               terminals: [rollout_id, ...], group_events_upto, tasks_upto} -> {commit_seq} (dense
               from 1). One log transaction; the same `part` again gives the same answer.
               `group_events_upto` (event_seq, dense from 0) and `tasks_upto` (group_id) are
               exclusive: every row below is in this part or an earlier one; left out or 0 = nothing
               newer. Code `fenced`: payload {refused: [[run_id, rollout_id, attempt, reason],
               ...]}; nothing was committed, leave those rows out and try again as another part
    published  (run) payload {commit_seq}: commits/<seq>.json is on disk
    propose    (run) payload {decisions: [{group_id, kept, reason, num_valid, mean_reward, min_version}]} -> {decisions: [...]}: what
               stands in the log, which is the first proposal
    handout    (run) payload {consumer, groups: [[group_id, min_version, bytes], ...]} -> {delivered: [[group_id, delivery_seq], ...],
               stale: [group_id, ...]}: dense delivery_seq in the order asked for
    cursor     (run) payload {consumer, seq}: everything below `seq` is trained and durable -> {} or code `conflict`
Down, to all
    welcome    re = hello; payload {worker, endpoints: {role: [location, ...]}, refused: [[run_id, rollout_id, attempt], ...]}
    endpoints  payload {role: [location, ...]}: whenever they change
    cancel     (run, rollout, attempt): stop it, keep partial turns, say `released` or `failed`
    drain      finish what is in hand, take nothing new, then leave
    version    (run) payload {version}: newest published policy version
    paused     (to RUN) payload {backend, paused}: it takes new weights, or serves again; waiting for it costs no budget
Down, to the store
    run        (run) payload = `RunSnapshot` below: on `hello` for every open run, and when a run is made
    terminal   (run, rollout, group) payload {attempt, status, failure_class, failure_code, failure_message, sample_index, rollout_key,
               task_id, data_source, env, agent, queue_s, extra}: a rollout that ended without a
               trajectory; write its row
    group_complete (run, group) payload {members: [GroupMember as list, ...], task_id}: propose a decision
    finished   (run) payload {state}: no group of the run is open any more and everything is stored

RunSnapshot = {run_id, config, filter_sql, group_size, seed, state, tasks: [TASKS rows not yet
stored], unpublished: [{commit_seq, part, files}], terminals: [as `terminal`], complete: [as
`group_complete`], kept: [group_id, ...] (decided, not handed out), delivered: [[group_id,
delivery_seq], ...], group_events: [GROUPS rows not yet stored], cursors: {consumer: seq}, parts:
[part, ...] (all that the log knows: other files are orphans)} New TASKS and GROUPS rows reach a
running store as `rows` (run) payload {table, rows}.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from operator import attrgetter

import orjson
import pyarrow as pa

from prorl.schema import CONTROL
from prorl.types import AttemptKey, Json


class Kind(StrEnum):
    """What a control row says; the module docstring has who sends it and what it carries."""

    HELLO = "hello"
    STARTED = "started"
    PROGRESS = "progress"
    FAILED = "failed"
    RELEASED = "released"
    STATS = "stats"
    RESERVE = "reserve"
    COMMIT = "commit"
    PUBLISHED = "published"
    PROPOSE = "propose"
    HANDOUT = "handout"
    CURSOR = "cursor"
    ACK = "ack"
    REPLY = "reply"
    WELCOME = "welcome"
    ENDPOINTS = "endpoints"
    CANCEL = "cancel"
    DRAIN = "drain"
    VERSION = "version"
    PAUSED = "paused"
    RUN = "run"
    ROWS = "rows"
    TERMINAL = "terminal"
    GROUP_COMPLETE = "group_complete"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlRow:
    """One event or command; fields that a kind does not use keep their defaults."""

    kind: Kind
    seq: int = 0
    re: int = 0
    run_id: str = ""
    rollout_id: int = -1
    group_id: int = -1
    attempt: int = -1
    stage: str = ""
    code: str = ""
    payload: Json = field(default_factory=dict)

    @property
    def key(self) -> AttemptKey:
        """The attempt that the row is about."""
        return AttemptKey(self.run_id, self.rollout_id, self.attempt)


_STRUCT = pa.struct(list(CONTROL))
_scalars = attrgetter(*CONTROL.names[:-1])


def to_batch(rows: Iterable[ControlRow]) -> pa.RecordBatch:
    """Pack rows for one send. Raises TypeError for a payload that is not JSON."""
    values = [(*_scalars(row), orjson.dumps(row.payload)) for row in rows]
    return pa.RecordBatch.from_arrays(pa.array(values, _STRUCT).flatten(), schema=CONTROL)


def from_batch(batch: pa.RecordBatch) -> list[ControlRow]:
    """Unpack a batch in order. Raises ValueError for an unknown kind."""
    columns = [column.to_pylist() for column in batch.columns]
    return [
        ControlRow(
            seq=seq,
            re=re,
            kind=Kind(kind),
            run_id=run_id,
            rollout_id=rollout_id,
            group_id=group_id,
            attempt=attempt,
            stage=stage,
            code=code,
            payload=orjson.loads(payload),
        )
        for seq, re, kind, run_id, rollout_id, group_id, attempt, stage, code, payload in zip(
            *columns, strict=True
        )
    ]
