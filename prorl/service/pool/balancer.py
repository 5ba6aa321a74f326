"""Chooses the backend that serves a rollout: a min-heap over in-flight work, sticky for its life.
Pure.

A backend's load is the number of rollouts that it serves *now*: `release` lowers it when a
rollout ends (a count that never goes down is round-robin with extra steps). On a slow server a
rollout weighs more (`weigh`, from `Paces`). Equal loads go to the one that was chosen longest
ago. Health and loads are kept for every backend, in the pool or named by a run alone.

Invariants: the in-flight counts sum to the number of rollouts assigned; a rollout keeps its backend
until released, even when that backend is drained, ejected or removed; slow answers alone never take
more than half of the pool out (a network hiccup must not empty it), what is known to be dead is out
even when nothing is left.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Collection, Hashable, Mapping
from collections.abc import Set as AbstractSet
from enum import StrEnum
from types import MappingProxyType

from prorl.errors import NotFoundError

Suits = Callable[[str], bool]
"""Returns whether a backend may serve a certain rollout."""


class BackendState(StrEnum):
    READY = "ready"
    EJECTED = "ejected"
    """It is ill: no rollout until it has shown that it is well."""
    DRAINING = "draining"
    FENCED = "fenced"
    """It has not the newest weights: no rollout until it has them."""


class Balancer:
    def __init__(self, names: Collection[str] = ()) -> None:
        self._state: dict[str, BackendState] = {}
        self._in_flight: dict[str, int] = {}
        self._chosen: dict[str, int] = {}
        self._owner: dict[Hashable, str] = {}
        self._ejected: set[str] = set()
        self._fenced: set[str] = set()
        self._weight: dict[str, float] = {}
        self._heap: list[tuple[float, int, str]] = []
        self._ticks = itertools.count(1)
        for name in names:
            self.add(name)

    @property
    def states(self) -> Mapping[str, BackendState]:
        return MappingProxyType({name: self.state(name) for name in self._state})

    @property
    def fenced(self) -> AbstractSet[str]:
        return self._fenced

    def state(self, name: str) -> BackendState:
        if name in self._ejected:
            return BackendState.EJECTED
        if name in self._fenced:
            return BackendState.FENCED
        return self._state.get(name, BackendState.READY)

    def in_flight(self, name: str) -> int:
        return self._in_flight.get(name, 0)

    def weigh(self, weights: Mapping[str, float]) -> None:
        """Sets the weight of a rollout on each backend; 1 where nothing is stated."""
        changed = self._weight.keys() | weights.keys()
        self._weight = dict(weights)
        for name in changed:
            self._push(name)

    def load(self, name: str) -> float:
        """Returns what the backend would have to do with one rollout more."""
        return (self.in_flight(name) + 1) * self._weight.get(name, 1.0)

    def add(self, name: str) -> None:
        """Put a backend into the pool, or end its drain; idempotent. Says nothing of its health."""
        self._state[name] = BackendState.READY
        self._chosen.setdefault(name, 0)
        self._push(name)

    def remove(self, name: str) -> None:
        """Take a backend out; rollouts that it serves stay with it until released. Idempotent."""
        self._state.pop(name, None)
        self._forget_idle(name)

    def drain(self, name: str) -> None:
        if name not in self._state:
            raise NotFoundError(f"backend {name!r} is not in the pool")
        self._state[name] = BackendState.DRAINING

    def eject(self, name: str, *, dead: bool = True) -> bool:
        """Give it nothing while it is ill. False when it is merely slow (not `dead`) and half of
        the pool is out already.
        """
        if name in self._ejected:
            return True
        if not dead and name in self._state:
            out = sum(server in self._ejected for server in self._state)
            if 2 * (out + 1) > len(self._state):
                return False
        self._ejected.add(name)
        return True

    def restore(self, name: str) -> None:
        """It is well again; ends neither a drain nor a fence. Idempotent."""
        self._ejected.discard(name)
        self._push(name)

    def fence(self, name: str) -> None:
        """Give it nothing until `unfence`, whatever else its state is; idempotent."""
        self._fenced.add(name)

    def unfence(self, name: str) -> None:
        """It has the newest weights; idempotent."""
        self._fenced.discard(name)
        self._push(name)

    def acquire(
        self,
        rollout: Hashable,
        among: Collection[str] = (),
        *,
        avoid: Collection[str] = (),
        suits: Suits | None = None,
    ) -> str | None:
        """The rollout's backend: what it has, else the least loaded of the pool or of `among`.
        `among` need not be in the pool, `avoid` is the last resort; None when nothing is able.
        """
        if rollout in self._owner:
            return self._owner[rollout]
        if among or avoid or suits:
            name = self._least_of(among or self._state, avoid, suits)
        else:
            name = self._least()
        if name is not None:
            self.assign(rollout, name)
        return name

    def able(self, among: Collection[str] = (), suits: Suits | None = None) -> bool:
        return bool(self._able_of(among or self._state, suits))

    def assign(self, rollout: Hashable, name: str) -> None:
        """Say that this backend serves the rollout, e.g. after a restart. Replaces an earlier
        assignment.
        """
        self.release(rollout)
        self._owner[rollout] = name
        self._in_flight[name] = self._in_flight.get(name, 0) + 1
        self._chosen[name] = next(self._ticks)
        self._push(name)

    def release(self, rollout: Hashable) -> None:
        """The rollout has ended or will be leased anew; idempotent."""
        name = self._owner.pop(rollout, None)
        if name is not None:
            self._in_flight[name] -= 1
            self._push(name)
            self._forget_idle(name)

    def _able(self, name: str) -> bool:
        return self._state.get(name) is BackendState.READY and self._fit(name)

    def _fit(self, name: str) -> bool:
        return name not in self._ejected and name not in self._fenced

    def _push(self, name: str) -> None:
        """Note the present count; older entries of the backend stay. Entries are never updated in
        place: what does not match the present count is skipped when it surfaces.
        """
        if self._able(name):
            heapq.heappush(self._heap, (self.load(name), self._chosen[name], name))
        if len(self._heap) > 16 * len(self._state):
            ready = [n for n in self._state if self._able(n)]
            self._heap = [(self.load(n), self._chosen[n], n) for n in ready]
            heapq.heapify(self._heap)

    def _least(self) -> str | None:
        while self._heap:
            load, chosen, name = self._heap[0]
            if self._able(name) and (load, chosen) == (self.load(name), self._chosen[name]):
                return name
            heapq.heappop(self._heap)
        return None

    def _least_of(
        self, among: Collection[str], avoid: Collection[str], suits: Suits | None
    ) -> str | None:
        return min(
            self._able_of(among, suits),
            key=lambda name: (name in avoid, self.load(name), self._chosen.get(name, 0)),
            default=None,
        )

    def _able_of(self, among: Collection[str], suits: Suits | None) -> list[str]:
        return [
            name
            for name in among
            if self._fit(name)
            and self._state.get(name, BackendState.READY) is BackendState.READY
            and (suits is None or suits(name))
        ]

    def _forget_idle(self, name: str) -> None:
        if name not in self._state and not self._in_flight.get(name):
            self._in_flight.pop(name, None)
            self._chosen.pop(name, None)
