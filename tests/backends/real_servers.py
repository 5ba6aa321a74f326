"""Real model servers as processes behind wire taps: vLLM on the CPU, and the embedded one.

Both serve the toy, or another checkpoint. Each is a session of its own, so that a signal reaches
its engine too, which would outlive a killed server.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from prorl.backends.embedded import TOY
from prorl.types import Completion, GenerateRequest
from tests.backends.wire_tap import Tap

VLLM_PYTHON = os.environ.get("PRORL_VLLM_PYTHON", "")
NEEDS_VLLM = [
    pytest.mark.vllm,
    pytest.mark.skipif(
        not VLLM_PYTHON,
        reason="PRORL_VLLM_PYTHON names no interpreter with vLLM; `make test-vllm` makes one",
    ),
    pytest.mark.timeout(900),
]
START_S = 480.0
"""On two cores that others use too an import of vLLM alone has taken minutes."""
CONTEXT = 512
VLLM_ENVIRONMENT = {
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "OMP_NUM_THREADS": "1",
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
VLLM_FLAGS = {
    "--dtype": "float32",
    "--max-model-len": str(CONTEXT),
    "--kv-cache-memory-bytes": "128M",
    "--block-size": "32",
    "--distributed-executor-backend": "uni",
    "--logprobs-mode": "processed_logprobs",
    "--served-model-name": "toy",
    "--uvicorn-log-level": "warning",
}


class Server:
    """A model server on a port that it keeps over its lives, and the tap before it."""

    def __init__(self, name: str, argv: Sequence[str], folder: Path) -> None:
        self.port = _free_port()
        self.tap = Tap(self.port)
        self.name = name
        self.argv = [*argv, "--port", str(self.port)]
        self._log = folder / f"{name}.log"
        self._process: asyncio.subprocess.Process | None = None

    @property
    def url(self) -> str:
        return self.tap.url

    async def launch(self) -> None:
        await self.tap.listen()
        with self._log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self.argv,
                env={**os.environ, **VLLM_ENVIRONMENT},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    async def ready(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + START_S
        async with aiohttp.ClientSession() as session:
            while time.monotonic() < deadline and self._process.returncode is None:
                try:
                    async with session.get(f"http://127.0.0.1:{self.port}/health") as answer:
                        if answer.status == 200:
                            return
                except aiohttp.ClientError:
                    pass
                await asyncio.sleep(0.2)
        tail = self._log.read_text(errors="replace")[-2000:]
        code = self._process.returncode
        what = f"did not start within {START_S:g} s" if code is None else f"ended with {code}"
        raise AssertionError(f"{self.name} {what}:\n{tail}")

    def strike(self, number: signal.Signals) -> None:
        assert self._process is not None
        os.killpg(self._process.pid, number)
        if number is signal.SIGKILL:
            self.tap.refuse()

    async def end(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self.strike(signal.SIGKILL)
            await self._process.wait()
        self.tap.refuse()


def vllm(folder: Path, name: str = "vllm", model: Path = TOY, **flags: str) -> Server:
    overrides = {f"--{flag.replace('_', '-')}": value for flag, value in flags.items()}
    words = [word for pair in {**VLLM_FLAGS, **overrides}.items() for word in pair]
    module = [VLLM_PYTHON, "-m", "vllm.entrypoints.openai.api_server"]
    # vLLM 0.32 on a CPU dies of a prompt with a seed that it reads in two pieces.
    switches = ["--enforce-eager", "--enable-prompt-tokens-details", "--no-enable-chunked-prefill"]
    argv = [*module, "--model", str(model), "--host", "127.0.0.1", *words, *switches]
    return Server(name, argv, folder)


def embedded(folder: Path, name: str = "embedded", model: Path = TOY) -> Server:
    argv = [sys.executable, "-m", "prorl.backends.embedded", "--model", str(model)]
    return Server(name, [*argv, "--served-model-name", "toy"], folder)


@asynccontextmanager
async def serving(*made: Server) -> AsyncIterator[None]:
    async with AsyncExitStack() as stack:
        for server in made:
            stack.push_async_callback(server.end)
            await server.launch()
        await asyncio.gather(*(server.ready() for server in made))
        yield


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def furthest(model: Any, request: GenerateRequest, got: Completion) -> float:
    """The largest difference of what was sampled to the logprobs of a model of transformers."""
    import torch

    ids = torch.from_numpy(np.concatenate([request.prompt_ids_L, got.token_ids_C]).astype(np.int64))
    with torch.no_grad():
        logits_LV = model(input_ids=ids[None]).logits[0] / request.sampling.temperature
    first = len(request.prompt_ids_L) - 1
    logprobs = logits_LV[first:-1].log_softmax(-1).gather(1, ids[first + 1 :, None])[:, 0]
    return float(np.abs(got.logprobs_C - logprobs.numpy()).max())
