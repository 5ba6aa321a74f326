"""The embedded backend as a process.

`python -m prorl.backends.embedded --model DIR [--port 0] [--parent PID]`

Prints `ready {"url", "model", "pid"}` when it listens. It dies with the thread that
started it, and at once when `--parent` is not its parent any more. SIGTERM ends it within a second;
requests in flight get what they have. With the environment variable VLLM_API_KEY set, everything
but /health asks for that bearer token.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import orjson

from prorl.errors import ProrlError
from prorl.linux.calls import die_with_parent
from prorl.timing import run

if TYPE_CHECKING:
    from prorl.backends.embedded.backend import EmbeddedBackend
    from prorl.backends.server import TokenServer


def main(argv: list[str] | None = None) -> int:
    """Serve until SIGTERM; 0, or 2 with one line on stderr for a mistake of the caller."""
    options = _options(argv)
    if options.parent:
        die_with_parent(signal.SIGKILL, options.parent)
    os.environ["OPENBLAS_NUM_THREADS"] = os.environ["OMP_NUM_THREADS"] = "1"
    try:
        run(_serve(options))
    except ProrlError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m prorl.backends.embedded", description="Serve a Qwen3 checkpoint in numpy."
    )
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face directory")
    parser.add_argument("--served-model-name", default="", help="default: the directory's name")
    parser.add_argument("--port", type=int, default=0, help="0 takes any free port")
    parser.add_argument("--max-num-seqs", type=int, default=64, help="requests computed at a time")
    parser.add_argument(
        "--max-model-len", type=int, default=4096, help="context, at most the model's"
    )
    parser.add_argument("--parent", type=int, default=0, help="pid to die with")
    return parser.parse_args(argv)


async def _serve(options: argparse.Namespace) -> None:
    # numpy is first loaded here, after the number of threads is settled.
    from prorl.backends.embedded.backend import EmbeddedBackend
    from prorl.backends.embedded.engine import EngineSettings

    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    backend = EmbeddedBackend(
        options.model,
        settings=EngineSettings(rows=options.max_num_seqs, length=options.max_model_len),
    )
    name = options.served_model_name or options.model.resolve().name
    async with _server(options, backend, name) as server:
        ready = {"url": server.url, "model": name, "pid": os.getpid()}
        print(f"ready {orjson.dumps(ready).decode()}", flush=True)
        await stop.wait()
        await backend.close()


def _server(options: argparse.Namespace, backend: EmbeddedBackend, name: str) -> TokenServer:
    from prorl.backends.embedded.routes import control_routes
    from prorl.backends.server import TokenServer
    from prorl.tokenizer import HFTokenizer

    return TokenServer(
        backend,
        HFTokenizer(options.model),
        model=name,
        port=options.port,
        max_model_len=backend.engine.length,
        routes=control_routes(backend),
        label=backend.label,
        api_key=os.environ.get("VLLM_API_KEY", ""),
    )


if __name__ == "__main__":
    sys.exit(main())
