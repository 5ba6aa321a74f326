"""verifiers' own env server, with its own shell agent in its own subprocess runtime."""

import sys

from verifiers.v1.serve.pool import serve_env
from verifiers.v1.utils.loaders import resolve_env_config


def main() -> None:
    harness = {"id": "bash", "edit": False, "compaction": None}
    agent = {"harness": harness, "runtime": {"type": "subprocess"}}
    config = resolve_env_config({"taskset": {"id": "verifiers_chain"}, "agent": agent})
    # one worker for each core from the start
    serve_env(max_workers=2, elastic=False, address=f"tcp://127.0.0.1:{sys.argv[1]}", config=config)


if __name__ == "__main__":
    main()
