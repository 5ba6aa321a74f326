"""A stored run served by a real replay endpoint, in a process of its own: this module."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from prorl.flight import FlightNetwork, tune
from prorl.storage.serve.endpoint import Endpoint
from prorl.storage.serve.replay import open_replay


@contextmanager
def served(run_dir: Path) -> Iterator[str]:
    """Location of the endpoint; the process ends with the block."""
    command = [sys.executable, "-m", "tests.client.replay_process", str(run_dir)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            word, _, values = process.stdout.readline().partition(" ")
            assert word == "ready", "the endpoint did not start"
            yield json.loads(values)["location"]
        finally:
            process.stdin.close()
            process.wait(20)


async def _serve(run_dir: Path) -> None:
    """Serve until standard input closes."""
    with tempfile.TemporaryDirectory(prefix="prorl-hot-") as hot:
        endpoint = Endpoint(Path(hot) / "hot", 8 << 30)
        endpoint.add(*open_replay(run_dir))
        async with FlightNetwork(token=os.environ.get("PRORL_TOKEN", "")) as network:
            location = await network.listen("grpc://127.0.0.1:0", {}, endpoint.reads())
            print("ready", json.dumps({"location": location}), flush=True)
            await asyncio.to_thread(sys.stdin.read)
        endpoint.close()


if __name__ == "__main__":
    tune()
    asyncio.run(_serve(Path(sys.argv[1])))
    os._exit(0)
