"""The producers that `prorl bench stream` compares with.

They are one process with a raw TCP socket, which has the same trajectories in each rival's own
form.

    python -m configs.rivals.bench.stream RUN_DIR
        prints `ready {"port"}`, ends when its standard input closes

A request is one line, the name of a form; the answer is 8 bytes of length and the payload.
Everything that a real producer has at hand before it is asked is made beforehand (Arrow's bytes,
Python lists, padded tensors); what it must do per request (encode, pickle) is done per request. It
gets the tuning that our endpoint gets: malloc keeps its pages, TCP_NODELAY, one `sendall` of the
payload.
"""

from __future__ import annotations

import json
import os
import pickle
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson
import pyarrow as pa

from prorl.analysis.synthetic import delivered
from prorl.client import PackedBatch
from prorl.flight import tune
from prorl.storage.read.catalog import StoredRun
from prorl.storage.serve.replay import delivery_order, stored_index

if TYPE_CHECKING:
    from numpy.typing import NDArray

PAD_ID = 0
_LISTS = (
    "token_ids",
    "logprobs",
    "span_end",
    "span_kind",
    "span_version",
    "span_turn",
    "span_temperature",
)
_SCALARS = ("sequence_id", "rollout_id", "group_id", "sample_index", "attempt", "segment", "reward")


def read_run(run_dir: Path) -> PackedBatch:
    """All groups of a run in delivery order, as one batch."""
    stored = StoredRun(run_dir)
    index = stored_index(stored)
    return PackedBatch(
        delivered([index.read(group) for group in delivery_order(stored)]), stored.run_id
    )


def forms(batch: PackedBatch) -> dict[str, Callable[[], Any]]:
    """Name of a form -> what a producer does per request: bytes-like."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.arrow.schema) as writer:
        for i in range(0, batch.num_groups, 2):
            writer.write_batch(batch.groups(i, i + 2).arrow)
    raw = sink.getvalue()
    lists = [
        dict(zip((*_SCALARS, *_LISTS), values, strict=True))
        for values in zip(*_columns(batch), strict=True)
    ]
    padded = _padded(batch)
    return {
        "socket": lambda: raw,
        "json_lists": lambda: orjson.dumps(lists),
        "pickled_lists": lambda: pickle.dumps(lists, protocol=5),
        "dataproto": lambda: pickle.dumps(padded, protocol=5),
    }


def _columns(batch: PackedBatch) -> list[list[Any]]:
    return [batch.arrow.column(name).to_pylist() for name in (*_SCALARS, *_LISTS)]


def _padded(batch: PackedBatch) -> dict[str, Any]:
    """What trainers of the verl family pass around: every row padded to the longest.

    Ids, masks and positions are int64.
    """
    import torch

    columns = _blank(batch.num_sequences, batch.max_seqlen)
    dense = batch.dense()
    mask, logprobs = (dense.column(name).flatten().to_numpy() for name in ("loss_mask", "logprobs"))
    for row in range(batch.num_sequences):
        here = slice(int(batch.cu_seqlens[row]), int(batch.cu_seqlens[row + 1]))
        length = here.stop - here.start
        columns["input_ids"][row, :length] = batch.token_ids[here]
        columns["attention_mask"][row, :length] = 1
        columns["position_ids"][row, :length] = np.arange(length)
        columns["loss_mask"][row, :length] = mask[here]
        columns["rollout_log_probs"][row, :length] = logprobs[here]
    return {name: torch.from_numpy(values) for name, values in columns.items()} | {
        "rewards": torch.from_numpy(batch.rewards.copy())
    }


def _blank(rows: int, width: int) -> dict[str, NDArray[Any]]:
    shape = (rows, width)
    return {
        "input_ids": np.full(shape, PAD_ID, np.int64),
        "attention_mask": np.zeros(shape, np.int64),
        "position_ids": np.zeros(shape, np.int64),
        "loss_mask": np.zeros(shape, np.int64),
        "rollout_log_probs": np.zeros(shape, np.float32),
    }


def serve(run_dir: Path) -> None:
    """Answer until the process ends; consumers keep their connections and ask one at a time."""
    made = forms(read_run(run_dir))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print("ready", json.dumps({"port": listener.getsockname()[1]}), flush=True)
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=_answer, args=(connection, made), daemon=True).start()


def _answer(connection: socket.socket, made: dict[str, Callable[[], Any]]) -> None:
    with connection, connection.makefile("rb") as requests:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for line in requests:
            payload = memoryview(made[line.decode().strip()]())
            connection.sendall(payload.nbytes.to_bytes(8, "little"))
            connection.sendall(payload)


def _end_with_stdin() -> None:
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    tune()
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    serve(Path(sys.argv[1]))
