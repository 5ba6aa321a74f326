"""The answer of each route when all is well: mypy checks it where it is made, OpenAPI shows it."""

from __future__ import annotations

from collections.abc import Mapping

from typing_extensions import TypedDict


class Deleted(TypedDict):
    run_id: str
    deleted: bool


class StepShares(TypedDict):
    """Shares of the last steps of a trainer, since the gateway started."""

    steps: int
    trainer_wait_share: float
    """The share of the time that the trainer waits: until the step's last group was handed out."""
    idle_slot_share: float | None
    """The share of RUN's slots that is idle, whoever's rollouts are in the others; None without
    one.
    """
    wasted_share: float
    """The share of the rollouts' seconds that is wasted: ended early, failed, stale or left
    over.
    """


class PublishedVersion(TypedDict):
    run_id: str
    version: int
    failed: Mapping[str, str]
    """The reason of each failure, by backend."""
    pending: bool
    """Backends still load them."""
    verified: bool
    """True if `expected` was given, by which servers are compared with the trainer; a trainer
    without it finds out from its own ratios alone that a server has other weights.
    """


class BackendView(TypedDict):
    name: str
    state: str
    in_flight: int
    in_pool: bool
    reason: str
    busy_replies: int
    refused_replies: int
    cached_share: float | None
    reused_share: float | None


class BackendList(TypedDict):
    backends: list[BackendView]


class FailedBackends(TypedDict):
    failed: Mapping[str, str]
    """The reason of each failure, by backend."""


class BackendStateReply(TypedDict):
    name: str
    state: str


class Certificate(TypedDict):
    certificate: str
    authority: str


class Drained(TypedDict):
    node: str
    workers: list[str]
    in_flight: int


class HealthReply(TypedDict):
    ok: bool
