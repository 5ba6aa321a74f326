"""verifiers' own env server, with its own shell agent in its own subprocess runtime.

`serve_verifiers.py PORT`, or `serve_verifiers.py prepare`: the agent is a script with an
environment of its own, which the runtime makes with uv before its first rollout; that is done
while everything is installed, and locked, so that the first rollout fetches nothing.
"""

import asyncio
import subprocess
import sys

from verifiers.v1.harnesses.utils.launch import CHAT_PROGRAM_SOURCE
from verifiers.v1.runtimes.subprocess import SubprocessConfig, SubprocessRuntime
from verifiers.v1.serve.pool import serve_env
from verifiers.v1.utils.loaders import resolve_env_config


async def prepare() -> None:
    runtime = SubprocessRuntime(SubprocessConfig(), "prepare")
    await runtime.start()
    _, script = await runtime.prepare_uv_script(CHAT_PROGRAM_SOURCE, activate=False)
    subprocess.run(["uv", "lock", "--quiet", "--no-config", "--script", script], check=True)
    await runtime.stop()


def main() -> None:
    if sys.argv[1] == "prepare":
        return asyncio.run(prepare())
    harness = {"id": "bash", "edit": False, "compaction": None}
    agent = {"harness": harness, "runtime": {"type": "subprocess"}}
    config = resolve_env_config({"taskset": {"id": "verifiers_chain"}, "agent": agent})
    # one worker for each core from the start
    serve_env(max_workers=2, elastic=False, address=f"tcp://127.0.0.1:{sys.argv[1]}", config=config)


if __name__ == "__main__":
    main()
