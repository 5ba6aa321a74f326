"""One trained sequence as every other trainer wants it, and a feed of whole groups of them.

    for group in Feed("ROOT", "mine"):          # a list of records: all sequences of one group
        theirs.append(convert(group))
    ...                                         # their checkpoint, with feed.cursor in it
    feed.commit()

A trainer's adapter (`prorl/trainer/adapters/`) is `convert` and where its loop asks for data.
Arrays have one entry a token, so that a mask, a logprob or a version is where its token is; what a
sampled token alone has is 0 (versions: -1) elsewhere. numpy only: a trainer's image needs the
client, no more.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from prorl.client.advantages import Advantages
from prorl.client.client import connect
from prorl.client.packed import PackedBatch
from prorl.errors import UserError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from prorl.types import Float32, Int32


class Record(NamedTuple):
    """One append-only token sequence of a rollout. L tokens."""

    ids: Int32
    """[L] prompt, tool output and everything sampled, in order."""
    mask: NDArray[np.bool_]
    """[L] whether the token trains."""
    logprobs: Float32
    """[L] under the distribution that it was sampled from; 0 where it was not sampled."""
    versions: Int32
    """[L] policy version that sampled it; -1 where none did, or none that is known."""
    temperatures: Float32
    """[L] that it was sampled at; 0 where it was not sampled."""
    first: int
    """Place of the first sampled token: what trainers call the prompt ends here."""
    reward: float
    """The reward of the rollout."""
    advantage: float
    """The advantage of the rollout in its group; nan without advantages."""
    weight: float
    """1 over the sequences of its rollout that train, so that a rollout counts once; else 0."""
    group: int
    rollout: int
    sample: int
    segment: int
    routed_experts: NDArray[Any] | None = None
    """[R, layers * top_k] experts of its first R tokens, all but the last, if they were asked for
    (`Client.routed_experts`).
    """


def records(
    batch: PackedBatch, routed_experts: Sequence[NDArray[Any] | None] | None = None
) -> list[Record]:
    """The sequences of a batch, in its order. Views and copies are the caller's own to write to."""
    sampled = batch.sampled_index()
    mask = batch.loss_mask().astype(np.bool_)
    logprobs = np.zeros(batch.num_tokens, np.float32)
    logprobs[sampled] = batch.logprobs
    versions = np.full(batch.num_tokens, -1, np.int32)
    versions[sampled] = batch.per_sampled(batch.span_version)
    temperatures = np.zeros(batch.num_tokens, np.float32)
    temperatures[sampled] = batch.per_sampled(batch.span_temperature)
    keys = {
        name: batch.arrow.column(name).to_pylist()
        for name in ("group_id", "rollout_id", "sample_index", "segment", "weight")
    }
    sequences = []
    for row in range(batch.num_sequences):
        here = slice(int(batch.cu_seqlens[row]), int(batch.cu_seqlens[row + 1]))
        first = int(np.searchsorted(sampled, here.start))
        end = first == len(sampled) or sampled[first] >= here.stop
        sequences.append(
            Record(
                ids=batch.token_ids[here].copy(),
                mask=mask[here],
                logprobs=logprobs[here],
                versions=versions[here],
                temperatures=temperatures[here],
                first=here.stop - here.start if end else int(sampled[first]) - here.start,
                reward=float(batch.rewards[row]),
                advantage=float("nan" if batch.advantages is None else batch.advantages[row]),
                weight=keys["weight"][row],
                group=keys["group_id"][row],
                rollout=keys["rollout_id"][row],
                sample=keys["sample_index"][row],
                segment=keys["segment"][row],
                routed_experts=routed_experts[row] if routed_experts is not None else None,
            )
        )
    return sequences


class Feed:
    """Whole groups of a run in delivery order, from a cursor on; holds its address alone, so that
    it pickles and connects where it is iterated.

    `cursor` is after the last group that was taken. It belongs into the trainer's checkpoint;
    `commit` it when that is durable. Iterated again, it goes on from there.
    """

    def __init__(
        self,
        url: str | Path,
        run: str,
        *,
        consumer: str = "primary",
        cursor: str | None = None,
        advantages: Advantages = "group",
        wait_s: float = 10.0,
        routed_experts: bool = False,
    ) -> None:
        """`routed_experts`: fetch which experts the tokens went through, too."""
        self.url, self.run, self.consumer, self.cursor = str(url), run, consumer, cursor
        self._advantages, self._wait_s, self._routing = advantages, wait_s, routed_experts

    def __iter__(self) -> Iterator[list[Record]]:
        """Yields until the run ends; waits for groups that are not there yet."""
        with connect(self.url) as client:
            for batch in client.stream(
                self.run,
                self.consumer,
                self.cursor,
                groups_per_batch=1,
                advantages=self._advantages,
                wait_s=self._wait_s,
            ):
                routed_experts = (
                    client.routed_experts(batch, self.consumer) if self._routing else None
                )
                self.cursor = batch.cursor
                yield records(batch, routed_experts)

    def commit(self, cursor: str | None = None) -> None:
        """All groups before the cursor (default: the feed's) are trained and durable."""
        cursor = cursor or self.cursor
        if cursor:
            with connect(self.url) as client:
                client.commit(cursor, self.consumer)

    def log(self, step: int, values: Mapping[str, float], version: int | None = None) -> None:
        """Store what the trainer measured in a step with the run (`Client.log`); a replay stores
        nothing.
        """
        with connect(self.url) as client:
            client.log(self.run, step, values, version=version, consumer=self.consumer)

    def state_dict(self) -> dict[str, str | None]:
        return {"run": self.run, "consumer": self.consumer, "cursor": self.cursor}

    def load_state_dict(self, state: Mapping[str, str | None]) -> None:
        """Go on behind a checkpoint. Raises UserError for one of another run or consumer."""
        for name in ("run", "consumer"):
            if state.get(name) != getattr(self, name):
                raise UserError(
                    f"a checkpoint of {name} {state.get(name)!r}", f"one of {getattr(self, name)!r}"
                )
        self.cursor = state["cursor"]
