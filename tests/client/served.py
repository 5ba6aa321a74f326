"""A stored run served by a real replay endpoint in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def served(run_dir: Path) -> Iterator[str]:
    """Location of the endpoint; the process ends with the block."""
    command = [sys.executable, "-m", "prorl.bench.stream_server", str(run_dir)]
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
