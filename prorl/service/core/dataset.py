"""Runs that feed themselves: what was submitted is a dataset, sampled `epochs` times.

Nothing is sampled until the dataset is said to be whole. Then groups are made of its tasks as the
sampler wants them, each task once an epoch; whose turn it is follows from the run's seed and the
epoch alone. Progress (`RunDataset.fed`) is stored in the same transaction that creates the
group: a gateway that was killed neither skips a task nor repeats it.

Among tasks that are due together the longest start first, so that none of them finishes alone at
the end. A task's expected length is the number of tokens that its rollouts had in the epoch before,
or the mean where that is not known. A new window of tasks is added when the last one is nearly
empty, never between its tasks: a short task waits for its window only.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import orjson
from numpy.typing import NDArray

from prorl.service.core.accept import Acceptance, check_open, used
from prorl.service.core.candidates import Candidate
from prorl.service.core.changes import Base, CorePart, LogBatch
from prorl.service.core.sampler import may_open
from prorl.service.core.state import RunRecord
from prorl.service.log import log_schema as sql

AT_ONCE = 64
TURNS = 1024

_TASKS = (
    f"SELECT {', '.join(sql.DATASET_COLUMNS)} FROM dataset WHERE run_id = ? AND place IN ({{}})"
)

_LENGTHS = """
SELECT key, avg(num_sampled) FROM groups JOIN rollouts ON rollouts.run_id = groups.run_id
 AND rollout_id >= first_rollout AND rollout_id < first_rollout + n
 WHERE groups.run_id = ? AND key IN ({}) AND part <> '' GROUP BY key
"""


@lru_cache(maxsize=16)
def order(seed: int, epoch: int, size: int) -> NDArray[np.int64]:
    """The places of a dataset in the order of an epoch.

    >>> sorted(order(7, 0, 4).tolist()), bool((order(7, 0, 99) != order(7, 1, 99)).any())
    ([0, 1, 2, 3], True)
    """
    return np.random.default_rng((seed, epoch)).permutation(size)


class Datasets(CorePart):
    def __init__(self, base: Base, acceptance: Acceptance) -> None:
        super().__init__(base)
        self._acceptance = acceptance

    def add(self, run: RunRecord, candidates: Sequence[Candidate]) -> None:
        """Put tasks at the dataset's end that are not there yet, by their keys. Raises
        ConflictError for a key that stands for another task, or a dataset that is whole.
        """
        there = run.dataset.new_tasks | self._there(
            run, [candidate.key for candidate in candidates]
        )
        for candidate in candidates:
            place = run.dataset.num_tasks
            key = candidate.key or str(place)
            digest = there.get(key)
            if digest is None:
                check_open(run)
                row = (run.run_id, place, *candidate._replace(key=key), 0)
                self._changes.insert(sql.INSERT_TASK, row)
                there[key] = run.dataset.new_tasks[key] = candidate.digest
                run.dataset.num_tasks += 1
                self._acceptance.note_size(run, candidate.n)
            elif digest != candidate.digest:
                raise used(key)
        self._changes.mark_run(run)
        self._changes.urgent = True

    def note_durable(self, batch: LogBatch) -> None:
        """Note that new tasks of datasets are on disk."""
        for run_id, _, key, *_ in dict(batch.writes).get(sql.INSERT_TASK, ()):
            self._state.runs[run_id].dataset.new_tasks.pop(key)

    def _there(self, run: RunRecord, keys: Sequence[str]) -> dict[str, str]:
        marks = ", ".join("?" * len(keys))
        statement = f"SELECT key, digest FROM dataset WHERE run_id = ? AND key IN ({marks})"
        return dict(self._log.read(statement, (run.run_id, *keys)))

    def fill(self, run: RunRecord, room: int) -> None:
        """Make the groups that the sampler wants, once the pool has too few for `room` leases. A
        task that the filter has sit out has its turn and no group. What it said is on disk before
        the next turn is looked at.
        """
        if (
            not run.feeds
            or run.dataset.new_tasks
            or run.decisions.curating
            or (run.queues.pool and len(run.queues.pool) >= room)
        ):
            return
        demand = run.demand
        shortage = 0 if run.pool_end(demand) else may_open(demand) - len(run.queues.pool)
        remaining = run.config.epochs * run.dataset.num_tasks - run.dataset.fed
        # The last ones together: they decide when all have ended.
        missing = min(shortage, AT_ONCE if remaining > 2 * AT_ONCE else remaining)
        turns, chosen = TURNS, list[tuple[int, Candidate]]()
        while missing > 0 and turns > 0 and run.feeds:
            remaining = run.config.epochs * run.dataset.num_tasks - run.dataset.fed
            places = [self._place(run, run.dataset.fed + i) for i in range(min(missing, remaining))]
            turns -= len(places)
            for candidate, resting in self._candidates(run, places):
                epoch = run.dataset.fed // run.dataset.num_tasks
                run.dataset.fed += 1
                if resting > epoch:
                    run.dataset.skipped += 1
                    continue
                missing -= 1
                chosen.append((epoch, candidate))
            self._changes.mark_run(run)
            self._changes.urgent = True
        lengths = self._lengths(run, chosen)
        if not demand.strict:  # there a step's end cuts off what is left, and long ones cost more
            chosen.sort(key=lambda turn: (turn[0], -lengths[turn[1].key]))
        for epoch, candidate in chosen:
            sampling = candidate.sampling
            if run.config.server_priority:
                parsed = orjson.loads(sampling) | {"priority": -round(lengths[candidate.key])}
                sampling = orjson.dumps(parsed).decode()
            key = f"{epoch}/{candidate.key}"
            self._acceptance.add(run, candidate._replace(key=key, sampling=sampling))

    def _lengths(self, run: RunRecord, chosen: Sequence[tuple[int, Candidate]]) -> dict[str, float]:
        before = {
            f"{epoch - 1}/{candidate.key}": candidate.key for epoch, candidate in chosen if epoch
        }
        marks = ", ".join("?" * len(before))
        rows = self._log.read(_LENGTHS.format(marks), (run.run_id, *before)) if before else []
        tokens_by_key = {before[key]: tokens for key, tokens in rows}
        mean = sum(tokens_by_key.values()) / max(1, len(tokens_by_key))
        return {candidate.key: tokens_by_key.get(candidate.key, mean) for _, candidate in chosen}

    def _place(self, run: RunRecord, fed: int) -> int:
        epoch, index = divmod(fed, run.dataset.num_tasks)
        return int(order(run.config.seed, epoch, run.dataset.num_tasks)[index])

    def _candidates(self, run: RunRecord, places: Sequence[int]) -> list[tuple[Candidate, int]]:
        """The tasks at these places, in their order, and the epoch until which each sits out."""
        marks = ", ".join("?" * len(set(places)))
        rows = self._log.read(_TASKS.format(marks), (run.run_id, *set(places)))
        by_place = {
            place: (Candidate(*candidate), resting) for _, place, *candidate, resting in rows
        }
        return [by_place[place] for place in places]
