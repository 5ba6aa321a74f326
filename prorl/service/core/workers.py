"""Workers: who is there, what they hold, where they are reached.

A control stream that ends is a death. What the worker held is lost at once, or after the grace of
those that may come back (`WorkerRecord.grace_s`): workers of other hosts, whose line may have
broken, and chains that keep a journal, whose next incarnation reads it.

    stream ends -> handle_disconnect -> grace -> settle_orphans of `rollouts.py` -> LOST or RETURN
                                          |
                                        hello

What a hello says of the attempts that the worker had before:

    in_flight   the same incarnation still has these: nothing changes
    claims      a new incarnation goes on with these from its journal (ADOPT)
    the rest    they end now, or soon: `_settle_unclaimed`

`lifecycle.py` says what LOST and RETURN cost; `_end_of_last_incarnation` chooses between them where
a process has died. A worker that leaves in order says so first, or is told to (`drain`): what it
gives back then is charged to nobody. After a gateway's restart every worker says `hello`, as if its
stream had broken. A `hello` under a name that is taken replaces that worker.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import NamedTuple

from prorl.control import (
    Claim,
    ControlRow,
    Drain,
    Endpoints,
    Hello,
    Stats,
    Welcome,
)
from prorl.errors import FencedError, NotFoundError, UserError
from prorl.graph import GRAPH
from prorl.service.core.changes import Base, CorePart
from prorl.service.core.commits import Commits
from prorl.service.core.images import digests
from prorl.service.core.lifecycle import Event, EventKind
from prorl.service.core.rollouts import Rollouts
from prorl.service.core.state import IN_HAND, RolloutRecord, WorkerRecord, WorkerStatus
from prorl.service.core.versions import version_row
from prorl.timing import (
    CLAIM_GRACE_S,
    GIVE_UP_S,
    LEAST_GRACE_S,
    WORKER_GRACE_S,
    WORKER_SILENCE_S,
)
from prorl.types import AttemptKey, RolloutState, Stage

REMEMBERED_INCARNATIONS = 1024


class _Disconnected(NamedTuple):
    """A worker whose stream has ended, and what is its own within the grace."""

    worker: WorkerRecord
    in_flight: list[RolloutRecord]
    until: float


class Workers(CorePart):
    def __init__(self, base: Base, rollouts: Rollouts, commits: Commits) -> None:
        super().__init__(base)
        self._rollouts, self._commits = rollouts, commits
        self._incarnations: dict[str, str] = {}
        """Name by incarnation, the last one of each name behind its earlier ones; of names that are
        not here at most `REMEMBERED_INCARNATIONS`.
        """
        self._away: dict[str, _Disconnected] = {}
        self._came_at: float | None = None

    def have_all_reconnected(self, quiet_s: float) -> bool:
        """Returns whether workers have come, and none for so long. After a restart all come
        together, as fast as machine and network allow.
        """
        return self._came_at is not None and self._clock() - self._came_at >= quiet_s

    def hello(self, session: int, row: ControlRow) -> WorkerRecord:
        """Begin the session of a worker that has come, or come back, and answer its hello. Raises
        UserError for roles that are none, FencedError for an earlier incarnation of a name that has
        a later one.
        """
        hello = row.read_hello("a worker's hello")
        if not hello.roles or not hello.roles.keys() <= set(GRAPH.roles) or not hello.worker:
            raise UserError(
                f"hello of {hello.worker!r} with roles {', '.join(hello.roles)!r}",
                f"a name and some of {', '.join(GRAPH.roles)}",
            )
        worker = self._record(session, hello)
        self._check_incarnation(worker)
        self._came_at = self._clock()
        earlier = self._state.workers.get(worker.name)
        self._state.workers[worker.name] = worker
        refused = self._hold_in_flight(worker, hello.in_flight)
        adopted = self._adopt(worker, hello.claims)
        if earlier is not None:
            self._replace(earlier, worker)
        self._settle_unclaimed(worker)
        worker.status.endpoints = self._state.endpoints_of(worker)
        welcome = Welcome(
            endpoints=worker.status.endpoints,
            refused=tuple(refused),
            adopted=tuple(adopted),
        )
        self._changes.send(worker, ControlRow.of(welcome, re=row.seq))
        for run in self._state.open.values():
            self._changes.send(worker, version_row(run))
        self._tell_endpoints()
        return worker

    def _record(self, session: int, hello: Hello) -> WorkerRecord:
        return WorkerRecord(
            name=hello.worker,
            session=session,
            incarnation=hello.incarnation,
            roles=hello.roles,
            node=hello.node,
            host=hello.host,
            pid=hello.pid,
            location=hello.location,
            came_at=self._clock(),
            remote=hello.remote,
            can_resume=hello.can_resume,
            images=digests(hello.images),
            home=hello.home,
            fatal_attempt=hello.fatal_attempt,
            status=WorkerStatus(seen_at=self._clock(), leaving=hello.leaving),
        )

    def _settle_unclaimed(self, worker: WorkerRecord) -> None:
        """End the attempts that a worker had before its stream ended and does not name any more.

        A new incarnation has lost them: they end now. The same incarnation may have handed them on
        to a worker that comes back later, so they get `grace_s`: a moment on this host, longer from
        afar, where each stream waits for its own connection. A lease that it never took was lost on
        the way to it, which is nobody's fault.
        """
        away = self._away.pop(worker.name, None)
        grace_s = WORKER_GRACE_S if worker.remote else CLAIM_GRACE_S
        for record in away.in_flight if away else ():
            if record.holders or record.life.state not in IN_HAND:
                continue
            if away and away.worker.incarnation != worker.incarnation:
                end = _end_of_last_incarnation(record, away.worker, worker)
                self._rollouts.end_unheld(record, end)
            else:
                has_begun_here = record.lease_confirmed and not worker.remote
                end = EventKind.LOST if has_begun_here else EventKind.RETURN
                self._rollouts.cap_wait(record, grace_s, end)

    def _hold_in_flight(
        self, worker: WorkerRecord, attempts: Mapping[str, Iterable[AttemptKey]]
    ) -> list[AttemptKey]:
        """Note that the worker has these attempts in hand, by stage. Returns those that it must
        stop, since they are not current.

        The same incarnation has them: what an earlier one had is in its claims (`_adopt`). An
        attempt that two roles name is in the later one.
        """
        refused: list[AttemptKey] = []
        in_order = [(role, key) for role in GRAPH.roles for key in attempts.get(role, ())]
        for role, key in in_order:
            record = self._rollouts.find(key.run_id, key.rollout_id)
            if record is None or record.key != key or record.life.state not in IN_HAND:
                refused.append(key)
            elif worker.is_store:
                self._commits.reserve(worker, [key])
            else:
                self._rollouts.started(worker, record, key.attempt, role)
        return refused

    def _adopt(self, worker: WorkerRecord, claims: Iterable[Claim]) -> list[Claim]:
        """Let attempts of an earlier incarnation of the worker go on in this one, which has read
        them in its journal. Returns them with the resumes that each counts from now on; the same
        attempt goes on, so nothing is charged. One that a store had reserved and does not hold any
        more goes on, too: the store died with the worker, before it had the row on disk.
        """
        adopted: list[Claim] = []
        for claim in claims:
            record = self._rollouts.find(claim.run_id, claim.rollout_id)
            if record is not None and record.key == claim.key:
                self._rollouts.unreserve(record)
            event = Event(kind=EventKind.ADOPT, attempt=claim.attempt, resumes=claim.resumes)
            if record is not None and self._rollouts.apply(record, event):
                self._rollouts.started(worker, record, claim.attempt, Stage.RUN)
                adopted.append(claim._replace(resumes=record.life.resumes))
        return adopted

    def _check_incarnation(self, worker: WorkerRecord) -> None:
        """Raise FencedError for an earlier incarnation of a name: a frozen process may wake up and
        dial again after a later incarnation of its name has come.
        """
        if worker.incarnation in self._incarnations:
            keys = (
                key for key, name in reversed(self._incarnations.items()) if name == worker.name
            )
            if next(keys, "") != worker.incarnation:
                raise FencedError(
                    f"another incarnation of worker {worker.name!r} has taken its place"
                )
        self._incarnations[worker.incarnation] = worker.name
        if len(self._incarnations) > REMEMBERED_INCARNATIONS:
            here = {*self._state.workers, worker.name}
            absent = (key for key, name in self._incarnations.items() if name not in here)
            for key in list(islice(absent, len(self._incarnations) - REMEMBERED_INCARNATIONS)):
                del self._incarnations[key]

    def current(self, worker: WorkerRecord) -> bool:
        """Returns whether this session is its worker's present one, which alone may act."""
        return self._state.workers.get(worker.name) is worker

    def _replace(self, earlier: WorkerRecord, worker: WorkerRecord) -> None:
        """Treats a worker as away that comes back before its broken stream was noticed."""
        same_incarnation, in_flight = (
            earlier.incarnation == worker.incarnation,
            list(earlier.in_flight),
        )
        if same_incarnation:
            self._away[worker.name] = _Disconnected(earlier, in_flight, self._clock())
        for record in in_flight:
            end = EventKind.RETURN if worker.remote else EventKind.LOST
            if not same_incarnation:
                end = _end_of_last_incarnation(record, earlier, worker)
            self._rollouts.remove_holder(
                record, earlier, end, CLAIM_GRACE_S if same_incarnation else 0.0
            )

    def handle_disconnect(self, worker: WorkerRecord) -> None:
        """End what only this worker held, since its control stream has ended: at once, or after
        its grace (`WorkerRecord.grace_s`) unless it comes back within that.
        """
        if not self.current(worker):
            return
        del self._state.workers[worker.name]
        in_flight, grace_s = list(worker.in_flight), self._grace_s(worker)
        if grace_s:
            until = self._clock() + grace_s
            self._away[worker.name] = _Disconnected(worker, in_flight, until)
        for record in in_flight:
            end = EventKind.RETURN if worker.remote else EventKind.LOST
            self._rollouts.remove_holder(record, worker, end, grace_s)
        self._tell_endpoints()

    def _grace_s(self, worker: WorkerRecord) -> float:
        """Returns the worker's grace, less the time for which it has been silent already: the
        streams of a host that is cut off end long after its last word.
        """
        if not worker.remote:
            return worker.grace_s
        unheard_s = self._clock() - worker.status.seen_at
        return min(worker.grace_s, max(LEAST_GRACE_S, GIVE_UP_S - unheard_s))

    def forget(self) -> None:
        now = self._clock()
        for name in [name for name, away in self._away.items() if away.until < now]:
            del self._away[name]

    def note_seen(self, worker: WorkerRecord) -> None:
        """Note that a row of the worker has come: it is alive."""
        worker.status.seen_at = self._clock()

    def report(self, worker: WorkerRecord, role: str, stats: Stats) -> Stats | None:
        """Keep the newest report of a worker's role. Returns the one before, if there was any.
        Raises UserError for a role that it does not have.
        """
        if role not in worker.roles:
            expected = f"one of {', '.join(worker.roles)}"
            raise UserError(f"a report of {worker.name!r} about {role!r}", expected)
        before = worker.status.stats.get(role)
        worker.status.stats[role] = stats
        return before

    def note_leaving(self, worker: WorkerRecord) -> None:
        """Note that the worker leaves in order: what it gives back now is charged to nobody."""
        worker.status.leaving = True

    def drain(self, node: str, deadline_s: float | None) -> list[WorkerRecord]:
        """Ask every worker of a node to leave, again if need be. Returns these workers. Raises
        NotFoundError for a node of which no worker is there.
        """
        workers = [w for w in self._state.workers.values() if w.node == node and not w.is_store]
        if not workers:
            nodes = sorted({w.node for w in self._state.workers.values() if not w.is_store})
            raise NotFoundError(f"no node {node!r} works here; those that do: {', '.join(nodes)}")
        for worker in workers:
            self.note_leaving(worker)
            row = ControlRow.of(Drain(deadline_s=deadline_s))
            self._changes.send(worker, row)
        self._changes.urgent = True
        return workers

    def silent(self) -> list[WorkerRecord]:
        """Returns the workers that have been silent for too long while this process listened."""
        now = self._clock()
        return [
            w for w in self._state.workers.values() if now - w.status.seen_at > WORKER_SILENCE_S
        ]

    def suspend_leases(self) -> None:
        """Note which INIT workers get no leases, and why."""
        self._give_up_stalled(self._clock())
        for init in self._state.of_role("init"):
            init.status.lease_block_reason = (
                self._rollouts.node_links.block_reason(init.node) if init.remote else ""
            )

    def blocked_absent_nodes(self) -> Iterable[tuple[str, str]]:
        """Returns the blocked nodes that have no INIT worker here now, and why they are blocked."""
        here = {init.node for init in self._state.of_role("init")}
        return [(n, why) for n, why in self._rollouts.node_links.blocked_nodes() if n not in here]

    def _give_up_stalled(self, now: float) -> None:
        """Give back the attempts that a node has finished and cannot deliver, though its EVAL and
        the store have both been connected. EVAL keeps its rows and goes on trying, which shows when
        the line works again; rows that come late are refused.
        """
        stores = [now - store.came_at for store in self._state.of_role("store")]
        last = GRAPH.names[-1]
        for worker in self._state.of_role(last):
            stats = worker.status.stats.get(last)
            if stats is None or not worker.remote or not stores:
                continue
            if not stats.stalled_s:
                self._rollouts.node_links.clear_stall(worker.node)
            if min(stats.stalled_s, now - worker.came_at, *stores) <= GIVE_UP_S:
                continue
            self._rollouts.node_links.note_stall(worker.node)
            for record in list(worker.in_flight):
                if record.life.state is not RolloutState.RUNNING:
                    continue
                for holder in list(record.holders):
                    self._rollouts.stop(holder, record.key)
                    self._rollouts.remove_holder(record, holder, EventKind.RETURN)

    def _tell_endpoints(self) -> None:
        """Tell each worker whose upstreams have changed. To tell everybody everything grows with
        the square of the nodes.
        """
        for worker in self._state.workers.values():
            endpoints = self._state.endpoints_of(worker)
            if endpoints != worker.status.endpoints:
                worker.status.endpoints = endpoints
                self._changes.send(worker, ControlRow.of(Endpoints(locations=endpoints)))
        self._changes.urgent = True


def _end_of_last_incarnation(
    record: RolloutRecord, earlier: WorkerRecord, worker: WorkerRecord
) -> EventKind:
    """Returns whether an attempt of a worker's last incarnation is LOST, which charges it with that
    death.

    It is returned where its host died too, which shows in that another supervisor started this
    incarnation; and where it is known at which attempt that one died, that one alone is lost. Where
    it is not known, what RUN had not begun is returned: nothing of it was sampled, and no code of
    users has seen it.
    """
    if earlier.home != worker.home or earlier.status.leaving:
        return EventKind.RETURN
    name = "/".join(map(str, record.key))
    if worker.fatal_attempt:
        return EventKind.LOST if worker.fatal_attempt == name else EventKind.RETURN
    if record.life.state is not RolloutState.LEASED:
        return EventKind.LOST
    return EventKind.RETURN
