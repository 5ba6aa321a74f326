"""What an endpoint asks of an order of delivery, live or replayed, and what it is given."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

from prorl.errors import ConflictError


class Wanted(NamedTuple):
    """What a ticket asks of the order."""

    consumer: str
    seq: int
    max_groups: int
    """0 = no bound."""
    max_bytes: int
    wait_s: float


class Given(NamedTuple):
    """The groups from `Wanted.seq` on."""

    groups: tuple[int, ...]
    end: bool
    """Nothing will ever come after them."""
    stuck: str = ""
    """Why there are none, if the run does not move."""


class Order(Protocol):
    """What the endpoint needs of a run."""

    run_id: str

    @property
    def delivered(self) -> int:
        """How many groups have a delivery_seq."""

    @property
    def finished(self) -> bool:
        """Whether no group will ever be added to those that have a delivery_seq."""

    def committed(self, consumer: str) -> int:
        """delivery_seq that this consumer's last commit named; 0 without one."""

    async def take(self, wanted: Wanted) -> Given:
        """Groups from `wanted.seq` on: at least one unless none comes in time.

        Raises ConflictError for a seq ahead of the order.
        """

    async def commit(self, consumer: str, seq: int) -> None:
        """Everything before `seq` is trained and durable.

        Raises ConflictError for a seq ahead of the order.
        """


def bounded(
    groups: Iterable[int], size: Callable[[int], int], max_groups: int, max_bytes: int
) -> list[int]:
    """A prefix within the bounds, but at least one group.

    >>> bounded([1, 2, 3], lambda group: 10, 0, 25)
    [1, 2]
    """
    taken: list[int] = []
    total = 0
    for group in groups:
        total += size(group)
        if taken and (total > max_bytes or (max_groups and len(taken) >= max_groups)):
            break
        taken.append(group)
    return taken


def check_seq(seq: int, delivered: int, run_id: str) -> None:
    """Raise ConflictError for a cursor that the order has not reached."""
    if seq > delivered:
        raise ConflictError(
            f"cursor {run_id}@{seq} is ahead of run {run_id}, which has delivered {delivered}"
            " groups",
            f"at most {run_id}@{delivered}",
            "is this the run that the checkpoint was trained on?",
        )
