"""verl's TransferQueue beside ours on equal payloads: `python -m tests.trainer.transfer_queue`

The same groups, as verl's own classes take them (`kv_batch_put`, `kv_batch_get` over its storage
in Ray's actors) and as ours do: put writes a commit's files (no fsync), get streams over Flight.
Seconds, and CPU seconds of this process and all below it; the first step, in which either starts
up, is left out.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from prorl.analysis.synthetic import SyntheticShape, group
from prorl.analysis.synthetic_runs import write_run
from prorl.client import connect
from prorl.client.records import Feed, Record
from prorl.linux.procfs import cpu_s, descendants
from tests.client.replay_process import served

SHAPE = SyntheticShape(n=8, num_tokens=2048, num_turns=6, vocab_size=150_000)
GROUPS, STEPS = 32, 4


@contextmanager
def spent(what: str, timings: dict[str, list[tuple[float, float]]]) -> Iterator[None]:
    def cpu() -> float:
        return sum(map(cpu_s, (os.getpid(), *descendants(os.getpid()))))

    began, before = time.perf_counter(), cpu()
    yield
    wall = time.perf_counter() - began
    timings.setdefault(what, []).append((wall, cpu() - before))


def theirs(steps: list[list[list[Record]]], timings: dict[str, list[tuple[float, float]]]) -> None:
    import ray
    import transfer_queue as tq

    from prorl.trainer.adapters.verl import put

    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False)
    tq.init()
    try:
        for number, groups in enumerate(steps):
            with spent("TransferQueue put", timings):
                keys = [
                    key
                    for i, records in enumerate(groups)
                    for key in put(records, f"{number}-{i}", number)
                ]
            with spent("TransferQueue get", timings):
                data = tq.kv_batch_get(keys=keys, partition_id="train")
                rows = [row for name in ("input_ids", "response_mask") for row in data[name]]
            assert len(rows) == 2 * len(keys)
            tq.kv_clear(keys=keys, partition_id="train")
    finally:
        tq.close()
        ray.shutdown()


def main() -> None:
    timings: dict[str, list[tuple[float, float]]] = {}
    steps: list[list[list[Record]]] = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(STEPS):
            batches = [group(number * GROUPS + i, SHAPE) for i in range(GROUPS)]
            with spent("prorl put (files)", timings):
                run = write_run(Path(folder) / f"run-{number}", batches, "demo")
            with served(run) as where, connect(where) as client:
                next(client.stream("demo", "warm", groups_per_batch=1))
                with spent("prorl get", timings):
                    batch = next(client.stream("demo", "one", groups_per_batch=GROUPS))
                    assert batch.num_sequences == GROUPS * SHAPE.n
                with spent("prorl get, as records", timings):
                    steps.append(list(Feed(where, "demo", consumer="two")))
    tokens = sum(len(record.ids) for records in steps[0] for record in records)
    theirs(steps, timings)
    print(f"{GROUPS} groups of {SHAPE.n}, {tokens:,} tokens, a step; median of {STEPS - 1}")
    for what, rows in timings.items():
        wall, cpu = (sorted(column[1:])[(STEPS - 1) // 2] for column in zip(*rows, strict=True))
        print(f"{what:24} {wall:7.3f} s {cpu:7.3f} CPU s")


if __name__ == "__main__":
    main()
