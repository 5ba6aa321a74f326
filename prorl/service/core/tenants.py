"""Who shares a service with whom: weights for leases, a bound for what one tenant has in hand.

A run says whose it is (`tenant` in its config). Leases go to the tenant with the fewest rollouts in
hand for its weight, and in it to the run with the fewest for its own; a bound that is reached holds
back only the tenant that reached it. Counted over runs that are not finished.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from prorl.config import Quota
from prorl.service.core.state import RunRecord

Share = tuple[float, float]
"""Rollouts in hand for the weight: of the tenant, of the run. The smallest goes next."""

UNBOUNDED = Quota()


class TenantLoad:
    """What the tenants of some runs have at this moment; told of every grant that follows."""

    def __init__(self, quotas: Mapping[str, Quota], runs: Iterable[RunRecord]) -> None:
        self._quotas = quotas
        self._in_hand: Counter[str] = Counter()
        for run in runs:
            self._in_hand[run.config.tenant] += run.in_hand

    @property
    def num_in_hand(self) -> int:
        """Rollouts in hand, of all tenants."""
        return self._in_hand.total()

    def quota(self, run: RunRecord) -> Quota:
        """The quota of the run's tenant; one without a row has no bounds."""
        return self._quotas.get(run.config.tenant, UNBOUNDED)

    def share(self, run: RunRecord) -> Share:
        """The run's place in the order of leases."""
        ours = self._in_hand[run.config.tenant] / self.quota(run).weight
        return ours, run.in_hand / run.config.weight

    def has_room(self, run: RunRecord) -> bool:
        """Whether its tenant may have one more rollout in hand."""
        bound = self.quota(run).rollouts_in_hand
        return not bound or self._in_hand[run.config.tenant] < bound

    def granted(self, run: RunRecord) -> None:
        """One of its rollouts was leased."""
        self._in_hand[run.config.tenant] += 1
