"""prime-rl's trainer reads a run from files: packed micro-batches, one file a data rank and step.

    feed = Feed("ROOT", "mine", consumer="prime")
    for step in Steps(feed, Path(OUTPUT), ranks=8, seq_len=65536, groups_per_step=32): ...

Start their trainer with `transport.type = "filesystem"` and the same output directory, and no
orchestrator. Rows are packed by their own `prepare_batch`, which cuts a sequence at `seq_len`.
Mask, logprobs and advantages stand at their tokens, over the whole sequence; a temperature stands
where its token is predicted, one before it, since their trainer divides logits by it. Their losses
are sums over tokens, so that a rollout of several sequences counts once.

The cursor lies beside each step (`prorl.json`): a writer that is started again goes on behind the
newest whole one, and a step whose checkpoint they have may be committed (`Steps.commit`).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from prorl.client.records import Feed, Record
from prorl.trainer.adapters import check_temperature

STATE = "prorl.json"


def sample_of(record: Record, env_name: str = "prorl") -> Any:
    """prime-rl's `TrainingSample`. Raises UserError for greedy tokens: they have no ratio."""
    from prime_rl.transports.rollouts.types import TrainingSample

    return TrainingSample(env_name=env_name, **aligned(record))


def aligned(record: Record) -> dict[str, list[Any]]:
    """The lists of a sample, [L] each."""
    check_temperature([record], None, "the run")
    predicts = np.append(record.temperatures[1:], np.float32(0.0))
    return {
        "token_ids": record.ids.tolist(),
        "mask": record.mask.tolist(),
        "logprobs": record.logprobs.tolist(),
        "temperatures": np.where(predicts > 0, predicts, np.float32(1.0)).tolist(),
        "advantages": (record.mask * np.float32(record.advantage)).tolist(),
    }


class Steps:
    """Iterating writes one step after the other and gives its number, until the run ends."""

    def __init__(
        self, feed: Feed, output: Path, *, ranks: int, seq_len: int, groups_per_step: int
    ) -> None:
        self._feed, self._folder = feed, output / "rollouts"
        self._ranks, self._seq_len, self._groups = ranks, seq_len, groups_per_step

    def __iter__(self) -> Iterator[int]:
        import msgspec
        from prime_rl.trainer.batch import build_bin_cost, prepare_batch

        written = sorted(
            int(path.parent.name.removeprefix("step_"))
            for path in self._folder.glob(f"step_*/{STATE}")
        )
        step = written[-1] + 1 if written else 0
        if written:
            self._feed.cursor = self._cursor(written[-1])
        groups = iter(self._feed)
        while batch := list(islice(groups, self._groups)):
            samples = [sample_of(record) for record in chain.from_iterable(batch)]
            grid = prepare_batch(samples, self._seq_len, self._ranks, build_bin_cost(None))
            folder = self._folder / f"step_{step}"
            folder.mkdir(parents=True, exist_ok=True)
            files = {
                f"rank_{rank}.bin": msgspec.msgpack.encode(batches)
                for rank, batches in enumerate(grid)
            }
            # Last, and equal bytes when a killed writer's step is written again.
            files[STATE] = orjson.dumps({"cursor": self._feed.cursor})
            for name, content in files.items():
                (folder / f"{name}.tmp").write_bytes(content)
                (folder / f"{name}.tmp").rename(folder / name)
            yield step
            step += 1

    def commit(self, step: int) -> None:
        """A checkpoint of theirs that has seen this step is on disk."""
        self._feed.commit(self._cursor(step))

    def _cursor(self, step: int) -> str:
        state = orjson.loads((self._folder / f"step_{step}" / STATE).read_bytes())
        return str(state["cursor"])
