"""Reports why a run does not move, within `QUIET_S` of its last sign of progress.

Progress is any change of a run's counts, and each turn that RUN reports; it ends what was said at
once, before the next look. What the line names is the first thing, in the order of the dataflow
backwards, that would have to happen next. A run all of whose attempts fail alike, or whose filter
keeps nothing, moves and gets nowhere: that is said at once. A run without work whose submitter may
still submit is idle, not stalled.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import islice

from prorl.graph import GRAPH
from prorl.limits import Clock
from prorl.pluralize import pluralize
from prorl.service.core.images import image_of, nobody_has, waiting_for_guests
from prorl.service.core.state import RunRecord, State
from prorl.types import RolloutState

QUIET_S = 25.0

MIN_STREAK = 5
"""Attempts that failed one after the other with one code, before they are taken for the run's
trouble: more are on their way.
"""

NOTHING_KEPT = 32
"""Groups that were decided and not kept, none of them kept, before that is said. Of groups of which
one in ten is kept, 32 in a row are dropped once in thirty times.
"""

MESSAGE_CHARS = 300
"""The limit of the first failure's message in a run's trouble. A longer one lacks its middle: its
end often names the error, as in a traceback.
"""


def reason(
    run: RunRecord,
    workers: Mapping[str, int],
    able: bool,
    image: str,
    guests: Mapping[str, int],
    lease_block_reason: str,
    disk: str,
) -> str:
    """Returns what it waits for. `workers` by role; `image`: one that its next rollout asks for and
    no node has; `guests`: how many of its rollouts wait for which guest; `lease_block_reason`: why
    no INIT worker gets leases.
    """
    if disk:
        return disk
    for role in reversed(GRAPH.roles):
        if not workers.get(role):
            return f"no {role} worker is there"
    states, demand = run.progress.states, run.demand
    if run.life.paused and not run.in_hand:
        return "it is paused"
    queued = pluralize(run.queued, "rollout is queued", "rollouts are queued") if run.queued else ""
    if states[RolloutState.RESERVED]:
        rollouts = pluralize(states[RolloutState.RESERVED], "rollout")
        return f"the store has {rollouts} and does not commit"
    if guests and sum(guests.values()) >= states[RolloutState.RUNNING]:
        named = ", ".join(f"{count:,} for {name!r}" for name, count in sorted(guests.items()))
        return f"rollouts wait for guests from elsewhere, and none has come: {named}"
    if states[RolloutState.RUNNING]:
        running = pluralize(states[RolloutState.RUNNING], "rollout runs", "rollouts run")
        return f"{running} and none has ended a turn: a model server, a tool or a grader is slow"
    if states[RolloutState.LEASED]:
        waiting = pluralize(states[RolloutState.LEASED], "rollout waits", "rollouts wait")
        return f"{waiting} in INIT: no sandbox is ready (an image or packages may be on their way)"
    if demand.streaming and demand.uncommitted >= demand.max_uncommitted:
        groups = pluralize(demand.uncommitted, "kept group waits", "kept groups wait")
        return f"the trainer is behind: {groups} for its commit"
    if queued and lease_block_reason:
        return f"{queued} and no node gets leases: {lease_block_reason}"
    if queued and image:
        return (
            f"{queued} and no node has the image {image!r}:"
            " `prorl image` there, and start the node again"
        )
    if queued and not able:
        return (
            f"{queued} and no model server works for it: `prorl backends` lists them,"
            " `prorl backends add` or `prorl serve --policy` adds one"
        )
    if queued:
        return f"{queued} and no INIT slot is free"
    if run.undecided:
        groups = pluralize(run.undecided, "group waits", "groups wait")
        return f"{groups} for a decision: the filter is slow"
    if run.unstored or run.commits.parts:
        return (
            pluralize(run.unstored, "ended rollout waits", "ended rollouts wait") + " for the store"
        )
    return ""


def lacks_tasks(run: RunRecord) -> str:
    """Returns that an open run of which nothing is unfinished waits for its submitter."""
    if run.life.last:
        return ""
    before = (
        "all that was submitted has ended" if run.accepted.next_group else "nothing was submitted"
    )
    return f"{before} and the run is open: submit tasks, the last ones with last=True"


def nothing_kept(run: RunRecord) -> str:
    """Says that the filter drops whatever comes, with its reasons and what to do."""
    reasons = run.decisions.drop_reasons
    if (
        run.delivery.next_delivery
        or run.delivery.kept
        or reasons.total() < NOTHING_KEPT
        or reasons["redundant"]
    ):
        return ""
    words = ", ".join(f"{count:,} {name}" for name, count in reasons.most_common(3))
    mend = "take tasks of another difficulty, more samples of each, or another filter"
    if reasons["incomplete"] == reasons.total():
        mend = f"`prorl show {run.run_id} --failed` shows why no rollout is valid"
    return f"none of {reasons.total():,} groups was kept ({words}): {mend}"


def failure_streak(run: RunRecord) -> str:
    code, count, message = run.progress.failure_streak
    if count < MIN_STREAK:
        return ""
    words = " ".join(message.split())
    if len(words) > MESSAGE_CHARS:
        words = f"{words[: MESSAGE_CHARS // 2]} ... {words[-MESSAGE_CHARS // 2 :]}"
    return f"attempt after attempt fails with {code.value}, the first: {words}"


class ProgressWatchdog:
    def __init__(self, state: State, clock: Clock) -> None:
        self._state, self._clock = state, clock

    def look(self, disk: str) -> list[RunRecord]:
        """Note what each open run waits for; returns those of which that has changed."""
        now, changed = self._clock(), []
        workers = Counter(role for worker in self._state.workers.values() for role in worker.roles)
        inits = self._state.of_role("init")
        lease_block_reason = (
            inits[0].status.lease_block_reason
            if all(init.status.lease_block_reason for init in inits) and inits
            else ""
        )
        for run in self._state.open.values():
            current = run.signs
            if current != run.watch.moved[0]:
                run.watch.moved = (current, now)
            quiet = now - run.watch.moved[1] > QUIET_S
            waits = [
                *islice(run.queues.ready, 1),
                *(r for _, _, r in islice(run.queues.delayed, 1)),
            ]
            image = next((image_of(record.group) for record in waits), "") if quiet else ""
            unplaceable = image if image and nobody_has(self._state, image) else ""
            able = self._state.able(run)
            guests = waiting_for_guests(self._state, run.run_id) if quiet else {}
            why = (
                reason(run, workers, able, unplaceable, guests, lease_block_reason, disk)
                if quiet
                else ""
            )
            run.watch.trouble = "; ".join(filter(None, (failure_streak(run), nothing_kept(run))))
            run.watch.wait, run.watch.idle = why, lacks_tasks(run) if quiet and not why else ""
            before, run.watch.reported = run.watch.reported, (run.stalled, run.idle)
            if run.watch.reported != before:
                changed.append(run)
        return changed
