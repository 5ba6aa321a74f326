"""Ways to choose a rollout's server: our balancer, and what it is compared with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from hashlib import blake2b
from typing import Protocol

import numpy as np

from prorl.control import Served
from prorl.service.balancer import Balancer
from prorl.service.pace import Paces

Floats = np.ndarray[tuple[int], np.dtype[np.float64]]
HEAP, OURS, ALL_KNOWN = "cumulative heap", "ours", "knows the work"


class Pick(Protocol):
    """A way to choose a rollout's server."""

    def begin(self, rollout: int, task: int, tokens: float) -> int: ...
    def heard(self, server: int, tokens: float, seconds: float) -> None: ...
    def end(self, rollout: int) -> None: ...
    def join(self, server: int) -> None: ...
    def tell(self, now: float) -> None: ...


class Cumulative:
    """The server that was given least since it came."""

    def __init__(self, servers: range, speed_S: Floats) -> None:
        self._given, self._speed_S = dict.fromkeys(servers, 0.0), speed_S

    def begin(self, rollout: int, task: int, tokens: float) -> int:
        """The smallest count, which grows."""
        server = min(self._given, key=lambda one: (self._given[one], one))
        self._given[server] += 1
        return server

    def heard(self, server: int, tokens: float, seconds: float) -> None:
        """A turn of so many tokens took so long. Not heard."""

    def end(self, rollout: int) -> None:
        """Not heard."""

    def join(self, server: int) -> None:
        """Its count begins at 0."""
        self._given[server] = 0.0

    def tell(self, now: float) -> None:
        """The clock. Not heard."""


class RoundRobin(Cumulative):
    """One after the other."""

    def begin(self, rollout: int, task: int, tokens: float) -> int:
        """The next."""
        return list(self._given)[rollout % len(self._given)]


class Hashed(Cumulative):
    """The server with the smallest hash of itself and the task (rendezvous)."""

    def begin(self, rollout: int, task: int, tokens: float) -> int:
        """The same one for a task, always."""
        return min(self._given, key=lambda server: _hash(f"{task}/{server}"))


class Knows(Cumulative):
    """The server with the least left to do."""

    def begin(self, rollout: int, task: int, tokens: float) -> int:
        """By tokens that will be sampled there, this rollout's too, and the server's speed."""
        server = min(self._given, key=lambda s: ((self._given[s] + tokens) / self._speed_S[s], s))
        self._given[server] += tokens
        return server

    def heard(self, server: int, tokens: float, seconds: float) -> None:
        """So many less."""
        self._given[server] -= tokens


class Counted(Cumulative):
    """Our balancer, by rollouts in flight alone."""

    def __init__(self, servers: range, speed_S: Floats) -> None:
        self._balancer = Balancer([str(server) for server in servers])

    def begin(self, rollout: int, task: int, tokens: float) -> int:
        """The least loaded."""
        return int(self._balancer.acquire(rollout) or 0)

    def end(self, rollout: int) -> None:
        """Its place is free."""
        self._balancer.release(rollout)

    def join(self, server: int) -> None:
        """One more."""
        self._balancer.add(str(server))


class Ours(Counted):
    """With the paces of servers."""

    def __init__(self, servers: range, speed_S: Floats) -> None:
        super().__init__(servers, speed_S)
        self._now = 0.0
        self._paces = Paces(lambda: self._now)

    def heard(self, server: int, tokens: float, seconds: float) -> None:
        """As RUN says it."""
        self._paces.add(str(server), Served(sampled=round(tokens), llm_s=seconds))

    def tell(self, now: float) -> None:
        """As the gateway hears it."""
        self._now = now
        self._balancer.weigh(self._paces.weights())


def _hash(text: str) -> bytes:
    return blake2b(text.encode(), digest_size=8).digest()


PICKS: Mapping[str, Callable[[range, Floats], Pick]] = {
    OURS: Ours,
    HEAP: Cumulative,
    "round robin": RoundRobin,
    "hash of the task": Hashed,
    "without paces": Counted,
    ALL_KNOWN: Knows,
}
