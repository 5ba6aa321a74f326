"""One rank of a data-parallel trainer, for `tests/trainer/test_ranks.py`: trains a tiny weight with
DDP's collectives and writes down what it read.

    RANK=0 WORLD_SIZE=4 MASTER_ADDR=... MASTER_PORT=... python rank_script.py URL CURSOR FOLDER
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from prorl.client import PackedBatch
from prorl.trainer.dataset import RolloutDataset

STEP, MAX_TOKENS = 16, 8000


def weighted(batch: PackedBatch | None) -> tuple[torch.Tensor, list[int]]:
    """Sum over trained tokens of their advantage, as a feature; and which sequences those were."""
    if batch is None:
        return torch.zeros(1), []
    assert batch.advantages is not None
    trained = torch.from_numpy(batch.loss_mask()).float()
    tokens = torch.from_numpy(batch.advantages).repeat_interleave(batch.torch().cu_seqlens.diff())
    return (trained * tokens).sum().reshape(1), batch.arrow.column("sequence_id").to_pylist()


def main(url: str, cursor: str, folder: str) -> None:
    """Every pass a forward and a backward; every step one line of JSON."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    model = DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))
    bounds = {"groups_per_step": STEP, "max_tokens": MAX_TOKENS}
    steps = RolloutDataset(url, "demo", rank, world, cursor=cursor, **bounds)
    with Path(folder, f"rank-{rank}.jsonl").open("a", buffering=1) as out:
        for share in DataLoader(steps, batch_size=None):
            model.zero_grad()
            read: list[int] = []
            for share_pass in share.passes:
                feature, ids = weighted(share_pass)
                (model(feature) * world / share.num_trained).sum().backward()
                read += ids
            gradient = model.module.weight.grad.item()
            line = {"ids": read, "gradient": gradient, "passes": len(share.passes)}
            report = {**line, "tokens": share.num_tokens, "cursor": share.cursor}
            print(json.dumps(report), file=out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
