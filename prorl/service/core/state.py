"""The state of the gateway, in memory: runs, groups, rollouts, workers. A cache of the control log,
rebuilt from it at start. Only live things are here: a group leaves (`forget`) once it is decided
and every row of it is stored; `recover.py` reads any group back.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TypeVar

import orjson

from prorl.config import RunConfig
from prorl.control import Stats, TrajectorySummary
from prorl.filters import find_filter
from prorl.graph import GRAPH
from prorl.service.core.group_pool import GroupPool
from prorl.service.core.lifecycle import Event, EventKind, RolloutLife
from prorl.service.core.observed import StepUtilization
from prorl.service.core.sampler import UNKNOWN, Demand, Rate, reached
from prorl.service.pool.balancer import Balancer, Suits
from prorl.service.pool.weights import ServedWeights
from prorl.timing import WORKER_GRACE_S
from prorl.types import AttemptKey, FailureCode, GroupState, RolloutState

T = TypeVar("T")

NO_TRAJECTORY = TrajectorySummary()


KEPT_CLOSED = 64
"""Runs that are over and stay in memory for those who look at them."""

LISTED_FAILURES = 10
"""Pairs of code and node: a run on many nodes may have hundreds."""

PREFETCH_ROLLOUTS = 500
"""Rollouts of a run that may be in memory before they are started: reading them from the log one
group at a time would cost more than they do.
"""

IN_HAND = frozenset({RolloutState.LEASED, RolloutState.RUNNING, RolloutState.RESERVED})


COUNTS: Mapping[str, tuple[str, ...]] = {
    "life": ("paused", "problem"),
    "accepted": ("next_group", "next_rollout", "group_size"),
    "progress": ("states", "num_started"),
    "decisions": ("states", "drop_reasons", "next_event"),
    "commits": ("next_commit", "num_rows", "stored_bytes", "num_rewards", "reward_sum"),
    "outbox": ("end", "stored"),
    "delivery": ("next_delivery", "committed", "trained", "kept", "waiting"),
    "weights": ("version", "allocated_version"),
    "dataset": ("num_tasks", "fed", "skipped"),
    "pace": ("rate", "group_s", "handout_interval_s"),
}
"""The fields that the log keeps of a run as one text, by the record that has them: no restart
counts rows.
"""


class OrderedSet(dict[T, None]):
    """A set in the order in which its members came.

    What is decided over it follows from events alone; a set of records goes by where they lie in
    memory, and the same events would not lead to the same state twice.

    >>> names = OrderedSet[str]()
    >>> for name in ("b", "a", "c", "b"):
    ...     names.add(name)
    >>> names.discard("a")
    >>> list(names), "a" in names
    (['b', 'c'], False)
    """

    def add(self, member: T) -> None:
        self[member] = None

    def discard(self, member: T) -> None:
        self.pop(member, None)


@dataclass(slots=True)
class WorkerStatus:
    """Holds what a worker last reported, and what it was last told. `Workers` alone writes it."""

    seen_at: float = 0.0
    """The time when a row of it last came, on the loop's clock."""
    leaving: bool = False
    """It was asked to leave: what it gives back is charged to nobody."""
    stats: dict[str, Stats] = field(default_factory=dict)
    """The newest report of each of its roles."""
    endpoints: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    lease_block_reason: str = ""
    """The reason why it gets no leases; empty where it gets some."""


@dataclass(frozen=True, slots=True, eq=False)
class WorkerRecord:
    """Holds who a worker is, as its hello says, and what it has. Only `Rollouts` writes
    `in_flight`.
    """

    name: str
    session: int
    incarnation: str
    roles: Mapping[str, int]
    """Its stages, or `store`; for each the rows that it takes at a time."""
    node: str
    pid: int
    location: str
    host: str = ""
    came_at: float = 0.0
    remote: bool = False
    can_resume: bool = False
    """A restarted worker of the same name resumes its attempts."""
    home: str = ""
    """The incarnation of its node that started it. A death is charged only where that lives on."""
    fatal_attempt: str = ""
    """`run/rollout/attempt` whose step ended its last incarnation; empty where that is not
    known.
    """
    images: Mapping[str, str] | None = None
    """Digests of its node's images by name; None: it may have any."""
    status: WorkerStatus = field(default_factory=WorkerStatus)
    in_flight: OrderedSet[RolloutRecord] = field(default_factory=OrderedSet)

    @property
    def is_store(self) -> bool:
        return "store" in self.roles

    def num_in_flight(self, role: str) -> int:
        """Attempts that it has in hand and that are in this stage now."""
        if self.is_store:
            return len(self.in_flight)
        return sum(record.stage == role for record in self.in_flight)

    @property
    def grace_s(self) -> float:
        """Tells how long it may be away before what it holds is lost. A cable may have been pulled,
        or its next incarnation is about to read its journal.
        """
        waited_for = self.remote or (self.can_resume and not self.status.leaving)
        return WORKER_GRACE_S if waited_for else 0.0


@dataclass(slots=True)
class StoredRow:
    """The row of a rollout that the store has committed. `Commits` alone writes it."""

    part: str = ""
    """Name of the part that holds the row; empty while none does."""
    reward: float | None = None
    summary: TrajectorySummary = NO_TRAJECTORY


@dataclass(slots=True, eq=False)
class RolloutRecord:
    """A rollout and its current attempt. `Rollouts` alone writes it."""

    group: GroupRecord
    rollout_id: int
    sample_index: int
    life: RolloutLife
    message: str = ""
    backend: str = ""
    failed_on: str = ""
    """Backend that failed the last attempt: the next one goes elsewhere if it can."""
    stored: StoredRow = field(default_factory=StoredRow)
    holders: OrderedSet[WorkerRecord] = field(default_factory=OrderedSet)
    lease_confirmed: bool = False
    """True if INIT said that it has the lease."""
    since: float = 0.0
    """The time when it was queued or granted, on the loop's clock."""
    unplaced_at: float | None = None
    """Since when no node that is there has its image; None: one has, or it asks for none."""
    entered: float = 0.0
    """The time when it changed its state last, on the same clock."""
    stage: str = ""
    worker: str = ""
    node: str = ""
    """The node of its attempt, present or last."""
    num_sampled: int = 0
    """Tokens that the attempt has sampled, as far as it has said."""

    @property
    def run(self) -> RunRecord:
        return self.group.run

    @property
    def key(self) -> AttemptKey:
        return AttemptKey(self.group.run.run_id, self.rollout_id, self.life.attempt)

    @property
    def holder_names(self) -> list[str]:
        return sorted(worker.name for worker in self.holders)

    @property
    def rollout_key(self) -> str:
        """The rollout's name for clients and backends, the same for every attempt."""
        return f"{self.group.key}/{self.sample_index}"


@dataclass(slots=True)
class GroupMembers:
    """Holds how far the rollouts of a group are. `Rollouts` alone writes it."""

    pending: int = 0
    """Rollouts that have not ended."""
    opened: bool = False
    opened_at: float = 0.0
    """On the loop's clock; 0 = before the gateway started."""
    differs: bool = False
    """Rewards of two rollouts differ, while others have none yet."""
    cut: bool = False
    """The other rollouts were ended early: they could not change what becomes of the group."""


@dataclass(slots=True)
class GroupOutcome:
    """Holds what became of a group. `Groups` alone writes it."""

    state: GroupState = GroupState.OPEN
    reason: str = ""
    num_valid: int = 0
    mean_reward: float | None = None
    min_version: int = -1
    delivery_seq: int = -1


@dataclass(frozen=True, slots=True, eq=False)
class GroupRecord:
    """A group as it was accepted, and the records of what becomes of it."""

    run: RunRecord
    group_id: int
    key: str
    digest: str
    n: int
    first_rollout: int
    task_id: str
    data_source: str
    env: str
    task: str
    sampling: str
    extra: str
    accepted_at: float
    members: GroupMembers = field(default_factory=GroupMembers)
    decision: GroupOutcome = field(default_factory=GroupOutcome)
    rollouts: list[RolloutRecord] = field(default_factory=list)

    def add(self, rollout: RolloutRecord) -> None:
        """Add a rollout while the group is made, new or from the log."""
        self.rollouts.append(rollout)
        self.members.pending += not rollout.life.state.terminal

    @property
    def is_open(self) -> bool:
        """Tells whether the group is not decided."""
        return self.decision.state is GroupState.OPEN

    @property
    def is_evictable(self) -> bool:
        """Tells whether it need not stay in memory: not started, or settled."""
        return self.settled or (self.is_open and not self.members.opened)

    @property
    def settled(self) -> bool:
        """Tells whether nothing will change but its delivery."""
        return not self.is_open and all(rollout.stored.part for rollout in self.rollouts)


@dataclass(slots=True)
class RunLife:
    """Holds whether a run takes groups, gives leases, or is over. `RunLifecycle` writes it."""

    state: str = "open"
    """`open`, `finished`, or `failed`: nothing of it can be stored."""
    last: bool = False
    """No more groups will come."""
    cancelled: bool = False
    paused: bool = False
    started_at: float = 0.0
    finished_at: float = 0.0
    problem: str = ""
    """The reason why the service ended it."""


@dataclass(slots=True)
class RunAccepted:
    """Holds how many groups and rollouts were accepted. `Acceptance` alone writes it."""

    next_group: int = 0
    next_rollout: int = 0
    group_size: int = 1
    """The size of the largest group."""


@dataclass(slots=True)
class RunProgress:
    """Holds how far the rollouts of a run are. `Rollouts` alone writes it."""

    states: Counter[str] = field(default_factory=Counter)
    """Rollouts by state, of those that are not queued."""
    num_started: int = 0
    """Groups."""
    late_groups: int = 0
    """Open groups that take longer than groups do, when we last looked."""
    turns: int = 0
    failed_attempts: Counter[tuple[FailureCode, str]] = field(default_factory=Counter)
    """Attempts that ended without a result since the service began, by code and node."""
    failure_streak: tuple[FailureCode, int, str] = (FailureCode.NONE, 0, "")
    """The code with which its last attempts failed through no fault of the policy's, how many did
    so one after the other, and the first one's message. Empty again when a rollout completes.
    """


@dataclass(slots=True)
class RunDecisions:
    """Holds what became of groups, and what the filter said of tasks. `Groups` alone writes it."""

    states: Counter[str] = field(default_factory=Counter)
    """Groups by state, of those that are decided."""
    drop_reasons: Counter[str] = field(default_factory=Counter)
    """The reasons why groups were dropped; of a filter with many reasons the later ones count as
    `other`.
    """
    next_event: int = 0
    curating: int = 0
    """The number of decisions about tasks that are not durable yet."""


@dataclass(slots=True)
class RunCommits:
    """Holds what the store has committed of a run. `Commits` alone writes it."""

    parts: dict[str, int] = field(default_factory=dict)
    """Commits that are not published yet, by part."""
    next_commit: int = 1
    num_rows: int = 0
    """Rollouts whose row a part holds."""
    stored_bytes: int = 0
    num_rewards: int = 0
    reward_sum: float = 0.0
    unscored: str = ""
    """The message of the grader about the first rollout that it failed for."""


@dataclass(slots=True)
class RunOutbox:
    """Holds how far the outbox goes that tells the store of a run. `Journal` alone writes it."""

    end: int = 0
    """The last row about the run."""
    stored: int = 0
    """Up to it the store has written what the outbox had."""


@dataclass(slots=True)
class RunDataset:
    """The tasks of a run that feeds itself. `Datasets` alone writes it."""

    num_tasks: int = 0
    fed: int = 0
    skipped: int = 0
    """The number of these that the filter had sit out."""
    new_tasks: dict[str, str] = field(default_factory=dict)
    """Digests by key of those that are not durable yet."""


@dataclass(slots=True)
class RunQueues:
    """Groups and rollouts that wait for a lease, or for their end. Only its methods change it."""

    pool: GroupPool = field(default_factory=GroupPool)
    """Accepted, not started; their records are in the log only."""
    ready: deque[RolloutRecord] = field(default_factory=deque)
    """Members of started groups that wait for a lease."""
    delayed: list[tuple[float, int, RolloutRecord]] = field(default_factory=list)
    """A heap of rollouts that become ready at that time of the loop's clock: most of them wait for
    their next attempt after a failure of infrastructure.
    """
    ending: deque[tuple[GroupRecord, FailureCode]] = field(default_factory=deque)
    """Started groups that are still to be ended, and why (`Rollouts.end_groups`)."""

    def add_groups(self, first: int, end: int, now: float) -> None:
        """Queue accepted groups by their ids, from `first` to before `end`."""
        self.pool.extend(first, end, now)

    def next_group(self) -> int:
        """Take the group that has waited longest."""
        return self.pool.popleft()

    def add_members(self, rollouts: Iterable[RolloutRecord]) -> None:
        """Queue the rollouts of a group that starts, behind the others."""
        self.ready.extend(rollouts)

    def next_member(self) -> RolloutRecord | None:
        return self.ready.popleft() if self.ready else None

    def put_back(self, rollouts: Sequence[RolloutRecord]) -> None:
        """Put rollouts that cannot be placed now before the others, in their order."""
        self.ready.extendleft(reversed(rollouts))

    def queue_again(self, record: RolloutRecord, now: float, delay_s: float) -> None:
        """Queue a rollout before the others, after a delay."""
        if delay_s:
            heapq.heappush(self.delayed, (now + delay_s, record.rollout_id, record))
        else:
            self.ready.appendleft(record)

    def has_waiting(self, now: float) -> bool:
        """Make those ready whose delay is over. Returns whether any rollout waits for a lease."""
        while self.delayed and self.delayed[0][0] <= now:
            self.ready.appendleft(heapq.heappop(self.delayed)[2])
        return bool(self.ready or self.pool)

    def end(self, groups: Iterable[GroupRecord], code: FailureCode) -> None:
        """Queue groups for their end, by `code`."""
        self.ending.extend((group, code) for group in groups)

    def next_ending(self) -> tuple[GroupRecord, FailureCode]:
        return self.ending.popleft()

    def forget_endings(self) -> None:
        self.ending.clear()


@dataclass(slots=True)
class RunDelivery:
    """Holds how far the run is handed out and trained. `Groups` alone writes it."""

    kept: int = 0
    """Kept and not gone stale."""
    waiting: int = 0
    """Kept and not handed out."""
    next_delivery: int = 0
    cursors: dict[str, int] = field(default_factory=dict)
    committed: int = 0
    """Highest seq that the primary consumer ever committed."""
    trained: int = 0
    """Seq up to which the newest weights were trained, by publications; at least `committed`."""


@dataclass(slots=True)
class RunPace:
    """Holds what decisions and hand-outs tell the forecast (`Demand`). `Groups` alone writes it."""

    rate: Rate = UNKNOWN
    """The rate of kept groups among those that were decided."""
    group_s: float = 0.0
    """The seconds that a group takes from its start to its decision, about; 0 = not known."""
    handout_interval_s: float = 0.0
    """Seconds between two groups that trainers take, about; 0 = not known."""
    last_handout_at: float = 0.0
    """The time when one was taken last, on the loop's clock; 0 = not since the gateway started."""


@dataclass(slots=True)
class RunWeightsState:
    """Holds which weights the run has had. `Versions` alone writes it."""

    version: int = 0
    allocated_version: int = 0
    """Highest id given to weights, published or not: never given again."""
    published: bool = False
    """True if servers were given weights of this run."""
    announced: bool = False
    """True if its trainer gave them weights itself."""
    start: tuple[str, ...] = ()
    """Labels of the weights that served when the run began, without their nonce."""


@dataclass(slots=True)
class RunGrants:
    """Holds whether the run gets leases. `LeaseGrants` alone writes it."""

    granted_at: float = 0.0
    """The time when a lease was last granted, or somebody else last held it back."""
    expired: bool = False
    """Nobody has worked for it within its budget for waiting: what waits ends."""


@dataclass(slots=True)
class RunWatch:
    """Holds whether the run moves. `ProgressWatchdog` alone writes it."""

    moved: tuple[tuple[object, ...], float] = ((), 0.0)
    """Signs of progress, and since when they are so."""
    trouble: str = ""
    """The reason why an open run gets nowhere though it moves."""
    wait: str = ""
    """The event that an open run with work waits for; it holds while the signs are those of
    `moved`.
    """
    idle: str = ""
    """The notice that an open run has no work, and how to give it some; it holds as `wait` does."""
    reported: tuple[str, str] = ("", "")
    """The result of the last look: `stalled` and `idle` of the run."""


@dataclass(frozen=True, slots=True, eq=False)
class RunRecord:
    """A run: its config, what of it is in memory, and one record for each part of the core that
    knows something of it.
    """

    config: RunConfig
    created_at: float
    life: RunLife = field(default_factory=RunLife)
    accepted: RunAccepted = field(default_factory=RunAccepted)
    dataset: RunDataset = field(default_factory=RunDataset)
    queues: RunQueues = field(default_factory=RunQueues)
    grants: RunGrants = field(default_factory=RunGrants)
    progress: RunProgress = field(default_factory=RunProgress)
    decisions: RunDecisions = field(default_factory=RunDecisions)
    delivery: RunDelivery = field(default_factory=RunDelivery)
    pace: RunPace = field(default_factory=RunPace)
    commits: RunCommits = field(default_factory=RunCommits)
    outbox: RunOutbox = field(default_factory=RunOutbox)
    weights: RunWeightsState = field(default_factory=RunWeightsState)
    watch: RunWatch = field(default_factory=RunWatch)
    effort: StepUtilization = field(default_factory=StepUtilization)
    groups: dict[int, GroupRecord] = field(default_factory=dict)
    keys: dict[str, GroupRecord] = field(default_factory=dict)
    rollouts: dict[int, RolloutRecord] = field(default_factory=dict)

    @property
    def run_id(self) -> str:
        return self.config.run_id

    @property
    def display_state(self) -> str:
        life = self.life
        return "cancelled" if life.cancelled and life.state == "finished" else life.state

    @property
    def signs(self) -> tuple[object, ...]:
        """Returns what changes with any progress: counts, and the turns that RUN has reported."""
        return (
            *self.counts.values(),
            self.accepted.next_group,
            self.commits.next_commit,
            self.decisions.next_event,
            self.delivery.next_delivery,
            self.delivery.committed,
            self.weights.version,
            self.progress.turns,
        )

    @property
    def stalled(self) -> str:
        """Tells what it waits for when it does not move, or why it was refused or has failed."""
        if self.life.state != "open":
            return self.life.problem
        wait = self.watch.wait if self.watch.wait and self.signs == self.watch.moved[0] else ""
        return "; ".join(filter(None, (self.watch.trouble, wait)))

    @property
    def idle(self) -> str:
        """Tells that it is open and has no work. Its submitter has the next move: that is no
        stall, since tasks may come in phases; whoever waits for its rows must know it.
        """
        idle = self.life.state == "open" and self.watch.idle
        return idle if idle and self.signs == self.watch.moved[0] else ""

    @property
    def queued(self) -> int:
        return self.accepted.next_rollout - self.progress.states.total()

    @property
    def unstored(self) -> int:
        """Rollouts whose row no part holds."""
        return self.accepted.next_rollout - self.commits.num_rows

    @property
    def undecided(self) -> int:
        """Groups."""
        return self.accepted.next_group - self.decisions.states.total()

    @property
    def open_groups(self) -> int:
        """Groups that are started and not decided."""
        return self.progress.num_started - self.decisions.states.total()

    @property
    def counts(self) -> dict[str, int]:
        """Rollouts by state."""
        counts = {state.value: self.progress.states[state] for state in RolloutState}
        return counts | {RolloutState.QUEUED.value: self.queued}

    @property
    def group_states(self) -> dict[str, int]:
        """Groups by state."""
        counts = {state.value: self.decisions.states[state] for state in GroupState}
        return counts | {GroupState.OPEN.value: self.undecided}

    @property
    def group_counts(self) -> dict[str, int]:
        return self.group_states | {"pool": len(self.queues.pool)}

    @property
    def attempt_counts(self) -> dict[str, int]:
        """The commonest first."""
        counts = self.progress.failed_attempts.most_common(LISTED_FAILURES)
        return {
            f"{code.value} on {node}" if node else code.value: number
            for (code, node), number in counts
        }

    @property
    def mean_reward(self) -> float | None:
        commits = self.commits
        return commits.reward_sum / commits.num_rewards if commits.num_rewards else None

    @property
    def num_commits(self) -> int:
        return self.commits.next_commit - 1

    @property
    def has_work(self) -> bool:
        """Tells whether a store has anything to do for it: it is open, or its trainer is behind."""
        unstored = bool(self.commits.parts) or self.outbox.stored < self.outbox.end
        is_open = self.life.state == "open"
        return self.life.state != "failed" and (is_open or unstored or self.uncommitted_groups > 0)

    @property
    def uncommitted_groups(self) -> int:
        """Kept groups of a stream that its trainer has not committed."""
        streams, delivery = self.config.delivery == "stream", self.delivery
        return delivery.waiting + delivery.next_delivery - delivery.committed if streams else 0

    @property
    def feeds(self) -> bool:
        life = self.life
        whole = life.last and not life.cancelled and life.state == "open"
        return whole and self.dataset.fed < self.dataset.num_tasks * self.config.epochs

    @property
    def in_hand(self) -> int:
        return sum(self.progress.states[state] for state in IN_HAND)

    def pool_end(self, demand: Demand) -> Event | None:
        """Returns the event that ends every group of the pool; None while it may still start."""
        if self.life.cancelled:
            return Event(kind=EventKind.CANCEL, code=FailureCode.CANCELLED)
        if reached(demand):
            return Event(kind=EventKind.CANCEL, code=FailureCode.REDUNDANT)
        return Event(kind=EventKind.EXPIRE) if self.grants.expired else None

    @property
    def ahead(self) -> int:
        """Groups at the head of the pool that may be in memory."""
        return max(1, PREFETCH_ROLLOUTS // self.accepted.group_size)

    def is_next(self, group: GroupRecord) -> bool:
        """Returns whether a group waits at the head of the pool: it will be wanted soon."""
        waits = group.is_open and not group.members.opened and bool(self.queues.pool)
        return waits and 0 <= group.group_id - self.queues.pool.first < self.ahead

    @property
    def tag(self) -> str:
        """Tells how labels of its weights begin: no other run's do."""
        name = f"{self.config.run_id}\0{self.created_at!r}"
        return blake2b(name.encode(), digest_size=6).hexdigest()

    @property
    def demand(self) -> Demand:
        config, delivery, pace = self.config, self.delivery, self.pace
        handed_out_or_waiting = delivery.waiting + delivery.next_delivery
        return Demand(
            open_groups=self.open_groups,
            uncommitted=handed_out_or_waiting - delivery.cursors.get("primary", 0),
            untrained=handed_out_or_waiting - delivery.trained,
            kept=delivery.kept,
            max_open=config.max_open_groups,
            max_uncommitted=config.max_uncommitted_groups,
            target=config.target_groups,
            filtered=find_filter(config.filter).drops,
            streaming=config.delivery == "stream",
            delivered=delivery.next_delivery,
            perishable=config.delivery == "stream" and config.max_staleness >= 0,
            paused=self.life.paused,
            rate=pace.rate,
            step=config.groups_per_step,
            max_staleness=config.max_staleness,
            group_s=pace.group_s,
            late=self.progress.late_groups,
            handout_interval_s=pace.handout_interval_s,
        )

    @property
    def counters(self) -> str:
        """Written with every transaction that changes one."""
        return orjson.dumps(
            {
                part: {name: _plain(getattr(getattr(self, part), name)) for name in names}
                for part, names in COUNTS.items()
            }
        ).decode()

    def restore(self, counters: str) -> None:
        for part, counts in orjson.loads(counters).items():
            record = getattr(self, part)
            for name, count in counts.items():
                kind = type(getattr(record, name))
                setattr(record, name, Counter(count) if kind is Counter else count)
        self.pace.rate = Rate(*self.pace.rate)

    def forget(self, group: GroupRecord) -> None:
        """Drop a group that is at rest from memory; the log keeps it."""
        self.groups.pop(group.group_id, None)
        self.keys.pop(group.key, None)
        for rollout in group.rollouts:
            self.rollouts.pop(rollout.rollout_id, None)

    def add(self, group: GroupRecord) -> None:
        self.groups[group.group_id] = self.keys[group.key] = group
        self.rollouts.update((rollout.rollout_id, rollout) for rollout in group.rollouts)


def _plain(count: object) -> object:
    if isinstance(count, Counter):
        return {str(state): number for state, number in count.items() if number}
    return list(count) if isinstance(count, Rate) else count


class State:
    def __init__(self, balancer: Balancer | None = None) -> None:
        self.runs: dict[str, RunRecord] = {}
        """The runs that are wanted, and some that somebody asked for; the log has all."""
        self.num_commits = 0
        self.open: dict[str, RunRecord] = {}
        """The runs that are not finished: all that costs anything."""
        self.refused: dict[str, str] = {}
        """Runs that this prorl cannot read, and why. They stay in the log as they are."""
        self.workers: dict[str, WorkerRecord] = {}
        self.balancer = balancer or Balancer()
        self.should_serve: dict[str, ServedWeights] = {}
        """The weights that each backend should serve to which we give any."""
        self.serves: dict[str, tuple[str, int]] = {}
        """The (run, version) that each backend was last known to serve."""

    def acquire(
        self, record: RolloutRecord, *, avoid: Collection[str] = (), min_version: int = 0
    ) -> str | None:
        """A backend for a rollout, its own until released; None when there is no able one."""
        run = record.run
        suits = self._suits(run, min_version) if min_version else None
        return self.balancer.acquire(record, run.config.backends, avoid=avoid, suits=suits)

    def able(self, run: RunRecord, min_version: int = 0) -> bool:
        """Returns whether some backend may be given a rollout of the run."""
        return self.balancer.able(run.config.backends, self._suits(run, min_version))

    def _suits(self, run: RunRecord, min_version: int) -> Suits:
        def suits(name: str) -> bool:
            owner, version = self.serves.get(name, (run.run_id, min_version))
            return owner != run.run_id or version >= min_version

        return suits

    def add(self, run: RunRecord) -> None:
        self.runs[run.run_id] = run
        if run.life.state == "open":
            self.open[run.run_id] = run

    @property
    def num_closed(self) -> int:
        return len(self.runs) - len(self.open)

    def of_role(self, role: str) -> list[WorkerRecord]:
        return [worker for worker in self.workers.values() if role in worker.roles]

    @property
    def store(self) -> WorkerRecord | None:
        return next((worker for worker in self.workers.values() if worker.is_store), None)

    def endpoints(self) -> dict[str, tuple[str, ...]]:
        return {
            role: tuple(w.location for w in self.of_role(role) if w.location)
            for role in GRAPH.roles
        }

    def endpoints_of(self, worker: WorkerRecord) -> dict[str, tuple[str, ...]]:
        """Returns what a worker must dial besides its own host: the store, the last stage of every
        host.
        """
        if not worker.is_store:
            return {}
        last = GRAPH.names[-1]
        return {last: tuple(other.location for other in self.of_role(last) if other.location)}
