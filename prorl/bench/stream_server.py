"""Serves run directories over Flight in a process of its own.

`python -m prorl.bench.stream_server RUN_DIR ...`.

Prints `ready {"location"}` when it listens and ends when its standard input closes, so that it
cannot outlive who started it.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
from pathlib import Path

from prorl.flight import FlightNetwork, tune
from prorl.storage.serve.endpoint import Endpoint
from prorl.storage.serve.replay import open_replay

HOT_BYTES = 8 << 30


async def serve(run_dirs: list[Path]) -> None:
    """Serve until standard input closes."""
    with tempfile.TemporaryDirectory(prefix="prorl-hot-") as hot:
        endpoint = Endpoint(Path(hot) / "hot", HOT_BYTES)
        for run_dir in run_dirs:
            endpoint.add(*open_replay(run_dir))
        async with FlightNetwork(token=os.environ.get("PRORL_TOKEN", "")) as network:
            location = await network.listen("grpc://127.0.0.1:0", {}, endpoint.reads())
            print("ready", json.dumps({"location": location}), flush=True)
            await asyncio.to_thread(sys.stdin.read)
        endpoint.close()


if __name__ == "__main__":
    tune()
    asyncio.run(serve([Path(name) for name in sys.argv[1:]]))
    os._exit(0)
