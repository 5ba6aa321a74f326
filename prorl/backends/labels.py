"""Labels by which servers state the weights that sampled a token, and the versions that they stand
for.

The gateway names the weights of each load `TAG:VERSION:NONCE` (`prorl/service/publish.py`):
the tag is the run's, the nonce that of one load of one server, never used again. Version 0 of a run
is what the servers served when it began.

Invariants: a version is the run's own or UNKNOWN_VERSION; a token whose server stated one thing
before the call and another after it is unknown: a label that stands before a call begins and after
it ends stood in between. Where replies state nothing, many calls share one question.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from prorl.errors import BackendError
from prorl.limits import Clock
from prorl.timing import now
from prorl.types import UNKNOWN_VERSION, FailureCode, GenerateRequest, PolicyVersion

START_LABELS = frozenset({"default", "0"})
"""The labels that servers state for the weights that they were started with."""


def version_of(label: str | None, request: GenerateRequest) -> PolicyVersion:
    """The version of the request's run that a label names; None = the server states none.

    >>> import numpy as np; from prorl.types import RunWeights, SamplingParams
    >>> def read(label, weights):
    ...     return version_of(label, GenerateRequest(prompt_ids_L=np.zeros(1, np.int32), seed=0,
    ...         sampling=SamplingParams(), stop_token_ids=(), request_id="", session="",
    ...         weights=weights, newest_version=PolicyVersion(3)))
    >>> published = RunWeights("ab", start=("cd:9",), published=True)
    >>> labels = ("ab:7:x", "cd:9:x", "cd:10:x", "default", "7", None)
    >>> [read(label, published) for label in labels]
    [7, 0, -1, 0, -1, -1]
    >>> [read(label, published._replace(published=False)) for label in labels]
    [7, 3, -1, 3, -1, 3]
    >>> [read(label, None) for label in labels]
    [-1, -1, -1, 3, 7, 3]
    >>> [read(label, published._replace(announced=True)) for label in labels]
    [7, 0, -1, -1, -1, -1]
    """
    weights = request.weights
    believed = weights is None or not weights.published
    if label is None:
        return request.newest_version if believed else UNKNOWN_VERSION
    named, _, _ = label.rpartition(":")
    if label in START_LABELS and weights is not None and weights.announced:
        return UNKNOWN_VERSION  # a trainer's engines may start with weights of no version at all
    if label in START_LABELS or (weights is not None and named in weights.start):
        return request.newest_version if believed else PolicyVersion(0)
    if weights is None:
        return PolicyVersion(int(label)) if _is_number(label) else UNKNOWN_VERSION
    tag, _, version = named.partition(":")
    is_ours = tag == weights.tag and _is_number(version)
    return PolicyVersion(int(version)) if is_ours else UNKNOWN_VERSION


def label_of(tag: str, version: int, nonce: str) -> str:
    """Returns what a server is told to call weights; `nonce` is of this load alone."""
    return f"{tag}:{version}:{nonce}"


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) < 10


MUTE_S = 30.0
"""A server that states nothing is asked again after this long."""


class Labels:
    """Holds what one server states about its weights. Belongs to one event loop.

    `ask` gives the label, or None for a server that states none; raises BackendError.
    """

    def __init__(self, ask: Callable[[], Awaitable[str | None]], clock: Clock = now) -> None:
        self._ask, self._clock = ask, clock
        self._mute_until = -1.0
        self._asking = asyncio.Lock()  # one question at a time; those who wait share the next
        self._begun = self._answered = 0
        self._latest: str | None = ""

    def expire(self) -> None:
        """The server has been given other weights: what it said is over."""
        self._answered = 0

    async def before(self) -> str | None:
        """A label that stood before now. Raises BackendError."""
        return self._latest if self._answered else await self.after()

    async def after(self) -> str | None:
        """The label that stands now or later. Raises BackendError."""
        if self._clock() < self._mute_until:
            return None
        call = self._begun + 1
        async with self._asking:
            if self._answered < call:
                self._begun += 1
                self._latest = await self._ask()
                self._answered = self._begun
                self._mute_until = self._clock() + MUTE_S if self._latest is None else -1.0
            return self._latest

    async def proved(self, before: str | None) -> str | None:
        """The label of a call that ends now and began after `before` stood.

        "" when it changed in between, or cannot be asked any more.
        """
        try:
            return before if await self.after() == before else ""
        except BackendError as error:
            if error.code is FailureCode.CANCELLED:
                raise
            return ""
