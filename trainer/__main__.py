"""`python -m prorl.trainer --config FILE`: the trainer as a process.

Prints `ready {json}` when the model is about to be loaded, then one `step {json}` line per step on
stdout. SIGTERM and SIGINT end it after the step in hand, whose checkpoint is then complete; a
second one ends it at once, which costs that step and nothing else. Exit code 0: steps done or asked
to stop; 2: a mistake of the caller, in one line on stderr; 3: the service went away.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

from stamina.instrumentation import LoggingOnRetryHook, set_on_retry_hooks

from prorl.client import connect
from prorl.config import parse
from prorl.config.file import load_file
from prorl.errors import ProrlError, UserError
from prorl.linux.calls import die_with_parent
from prorl.trainer.config import TrainerConfig
from prorl.trainer.loop import train


def main(argv: list[str] | None = None) -> int:
    args = _arguments(argv)
    if args.die_with_parent:
        die_with_parent(signal.SIGKILL)
    # stdout is for whoever reads our lines; where structlog is installed, stamina would tell of
    # retries there.
    set_on_retry_hooks([LoggingOnRetryHook])
    # transformers draws bars on stderr, where our one line is what an error says
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    signals = _note_signals()
    try:
        if (ranks := int(os.environ.get("WORLD_SIZE", "1"))) > 1:
            raise UserError(
                f"the shipped trainer in {ranks} processes",
                "one: each would train every row",
                "start it without torchrun or accelerate, or write a trainer over client/ranks.py",
            )
        config = parse(TrainerConfig, load_file(args.config), f"trainer config {args.config}")
        say("ready", {"run": config.run, "pid": os.getpid()})
        with connect(config.service) as client:
            progress = train(config, client, hooks=(say_step,), stopped=lambda: bool(signals))
    except ProrlError as error:
        print(error, file=sys.stderr)
        return 2 if isinstance(error, UserError) else 3
    say("done", {"step": progress.step, "version": progress.version, "cursor": progress.cursor})
    return 0


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    options = argparse.ArgumentParser(
        prog="python -m prorl.trainer", description="Train a policy from a run's stream."
    )
    options.add_argument(
        "--config",
        type=Path,
        required=True,
        metavar="FILE",
        help="settings of prorl.trainer.config, YAML or JSON",
    )
    options.add_argument(
        "--die-with-parent",
        action="store_true",
        help="for a supervisor: be killed when the starting process dies",
    )
    return options.parse_args(argv)


def _note_signals() -> list[int]:
    """The signals that have asked us to end, as they come; a second one ends the process."""
    signals: list[int] = []

    def stop(number: int, _: object) -> None:
        if signals:
            os._exit(128 + number)
        signals.append(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    return signals


def say(event: str, values: Mapping[str, object]) -> None:
    print(event, json.dumps(values), flush=True)


def say_step(step: int, figures: Mapping[str, float]) -> None:
    say("step", {"step": step, **figures})


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # pyarrow.flight may wait for ever for its threads when the interpreter ends.
    os._exit(code)
