"""Who shares a service with whom: weights for leases, bounds for what one tenant takes.

A run says whose it is (`tenant` in its config). Leases go to the tenant with the fewest rollouts in
hand for its weight, and in it to the run with the fewest for its own; a bound that is reached holds
back only the tenant that reached it. Counted over runs that are not finished.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from prorl.config import Quota
from prorl.errors import QueueFullError
from prorl.service.core.state import RunRecord
from prorl.types import RolloutState

Share = tuple[float, float]
"""Rollouts in hand for the weight: of the tenant, of the run. The smallest goes next."""

UNBOUNDED = Quota()


class TenantLoad:
    """What the tenants of some runs have at this moment; told of every grant that follows."""

    def __init__(self, quotas: Mapping[str, Quota], runs: Iterable[RunRecord]) -> None:
        self._quotas = quotas
        self._in_hand: Counter[str] = Counter()
        self._open_groups: Counter[str] = Counter()
        for run in runs:
            self._in_hand[run.config.tenant] += run.in_hand
            self._open_groups[run.config.tenant] += run.open_groups

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

    def may_open(self, run: RunRecord) -> bool:
        """Whether its tenant may start one more group."""
        bound = self.quota(run).open_groups
        return not bound or self._open_groups[run.config.tenant] < bound

    def granted(self, run: RunRecord) -> None:
        """One of its rollouts was leased."""
        self._in_hand[run.config.tenant] += 1

    def opened(self, run: RunRecord) -> None:
        """One of its groups was started."""
        self._open_groups[run.config.tenant] += 1


def check_quota(
    quotas: Mapping[str, Quota], runs: Iterable[RunRecord], run: RunRecord, wanted: int
) -> None:
    """Check, before `wanted` rollouts are accepted, that their tenant has room.

    Raises QueueFullError when the tenant's bound on waiting rollouts or stored bytes is reached.
    """
    tenant = run.config.tenant
    quota = quotas.get(tenant, UNBOUNDED)
    ours = [one for one in runs if one.config.tenant == tenant]
    queued = sum(one.rollout_states[RolloutState.QUEUED] for one in ours)
    if quota.queued_rollouts and queued + wanted > quota.queued_rollouts:
        raise QueueFullError(
            f"tenant {tenant!r} has {queued:,} rollouts that wait, {wanted:,} more would exceed its"
            f" {quota.queued_rollouts:,}; send them when some have ended"
        )
    stored = sum(one.stored_bytes for one in ours)
    if quota.stored_bytes and wanted and stored >= quota.stored_bytes:
        raise QueueFullError(
            f"tenant {tenant!r} has stored {stored:,} bytes in runs that are not finished, of"
            f" {quota.stored_bytes:,}; finish or cancel a run, or raise `tenants`"
        )
