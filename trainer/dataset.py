"""A rank's share of a run as a torch dataset, for trainers that read by `DataLoader`.

    source = Source(url="trainer.json", run="mine", rank=rank, world=world, groups_per_step=32,
                    max_tokens=65536, cursor=saved)
    for step in DataLoader(RolloutDataset(source), batch_size=None):
        ...                                                  # a `Share` each; see client/ranks.py

Holds only what names the stream, so it pickles; it connects where it is iterated. At most one
worker process, since a stream has one order; not by `fork` once this process has used Flight
(`multiprocessing_context="spawn"`): a forked worker says so at once. A loader with a worker fetches
ahead: take the cursor of the step in hand, never a newer one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from torch.utils.data import IterableDataset, get_worker_info

from prorl.client import connect
from prorl.client.ranks import Share
from prorl.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Source:
    """What names a rank's stream; see `Client.stream_shares`.

    The token is not part of it: it comes from the root, the join file, or `PRORL_TOKEN`.
    """

    url: str | Path
    run: str
    rank: int
    world: int
    groups_per_step: int
    max_tokens: int
    consumer: str = "primary"
    cursor: str | None = None


class RolloutDataset(IterableDataset[Share]):
    """The steps of a run, one rank's share each."""

    def __init__(self, source: Source) -> None:
        super().__init__()
        self.source = source

    def __iter__(self) -> Iterator[Share]:
        """Iterate from the source's cursor on.

        Raises UserError in the second of several workers.
        """
        # Raises UserError in a DataLoader worker that is not the only one.
        worker = get_worker_info()
        if worker is not None and worker.num_workers > 1:
            raise UserError(
                f"a stream read by {worker.num_workers} DataLoader workers",
                "at most one: a stream has one order",
                "num_workers=0 or 1",
            )
        source = self.source
        with connect(source.url) as client:
            yield from client.stream_shares(
                source.run,
                source.rank,
                source.world,
                groups_per_step=source.groups_per_step,
                max_tokens=source.max_tokens,
                consumer=source.consumer,
                cursor=source.cursor,
            )
