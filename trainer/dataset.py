"""A rank's share of a run as a torch dataset, for trainers that read by `DataLoader`.

    steps = RolloutDataset("trainer.json", "mine", rank, world, groups_per_step=32,
                           max_tokens=65536, cursor=saved)
    for step in DataLoader(steps, batch_size=None):
        ...                                                  # a `RankShare` each; see
        client/ranks.py

Holds only what names the stream, so it pickles; it connects where it is iterated (the token comes
from the root, the join file, or `PRORL_TOKEN`). Not by `fork` once this process has used Flight
(`multiprocessing_context="spawn"`): a forked worker says so at once. A loader with a worker fetches
ahead: take the cursor of the step in hand, never a newer one.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from prorl.client import connect
from prorl.client.ranks import RankShare
from prorl.errors import UserError


class RolloutDataset(IterableDataset[RankShare]):
    """The steps of a run, one rank's share each; arguments as of `Client.stream_shares`."""

    def __init__(self, url: str | Path, run: str, rank: int, world: int, **more: Any) -> None:
        super().__init__()
        self._url, self._run, self._rank, self._world, self._more = url, run, rank, world, more

    def __iter__(self) -> Iterator[RankShare]:
        """Raises UserError in one of several workers: a stream has one order."""
        worker = get_worker_info()
        if worker is not None and worker.num_workers > 1:
            raise UserError(
                f"a stream read by {worker.num_workers} DataLoader workers",
                "at most one: a stream has one order",
                "num_workers=0 or 1",
            )
        with connect(self._url) as client:
            yield from client.stream_shares(self._run, self._rank, self._world, **self._more)
