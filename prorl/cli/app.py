"""The commands by name and help line; here alone an error becomes one line and an exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

from cyclopts import App, CycloptsError

from prorl.errors import NotFoundError, ProrlError, UserError
from prorl.linux.failpoints import VARIABLE

DONE, FAILED, MISTAKE, INTERRUPTED = 0, 1, 2, 130

COMMANDS = (
    (
        "demo",
        (
            "A tiny policy learns to use tools, through the whole service, in five minutes on two"
            " cores."
        ),
    ),
    ("run", "Run a task file: a service that lives as long as this one run."),
    ("eval", "How good a policy is: pass@k with an interval; nothing is trained."),
    ("new", "Start an env of your own: a folder with what works, to be changed."),
    ("check", "Whether tasks can be trusted: the oracle scores 1, a no-op 0, twice the same."),
    ("serve", "A service that stays: trainers and `prorl status` reach it over HTTP and Flight."),
    ("cluster", "Nodes for a service, placed by Dask: processes here, or jobs of Slurm, PBS ..."),
    ("node", "Work for a service on another host: sandboxes, INIT, RUN and EVAL here."),
    ("drain", "Have a node end what it has in hand and leave; no rollout is charged."),
    ("status", "What the service of a root is doing."),
    ("top", "The same again and again: rates of the stages, backends, open runs."),
    ("plan", "How many slots, nodes and tokens a second a rate of rollouts needs."),
    ("backends", "The model servers of a running service: ls, add, rm, drain, set."),
    ("token", "Tokens for others: one role, one run, until a date; revoked at once."),
    ("certs", "Certificates that others join with: how long they are valid; renew them."),
    ("ls", "The runs of a root."),
    ("show", "A run, or one rollout of it as a readable transcript."),
    ("sql", "SQL over what a run stored."),
    ("verify", "Check a run directory: hashes, invariants, exactly one row a rollout."),
    ("adopt", "Make a run directory known to a root whose log lacks it; read only from then on."),
    ("report", "Ready analyses of a run in one HTML file."),
    ("diff", "Two runs side by side, and the tasks whose reward moved."),
    ("annotate", "Say something of stored rollouts: labels, numbers, comments; append-only."),
    ("rescore", "Grade a stored run again, without a policy: other tests, another env."),
    ("compact", "Merge the small parts of a run; services do it by themselves."),
    ("upgrade", "What an older prorl wrote becomes what this one writes: log and runs."),
    ("gc", "Remove what compaction replaced; with --drop, old runs."),
    ("replay", "Serve a stored run to trainers, in the order in which it was delivered."),
    ("export", "A stored run as others read it: chat, verl, TRL, ATIF, HF datasets."),
    ("import", "Token-carrying rows of others, JSON lines or Parquet, as a run."),
    ("schema", "The columns of every edge and table; `--config` the JSON schema of config files."),
    ("image", "Images for sandboxes, made without any container registry: build, ls, rm."),
    ("renderer", "How a model's directory is spoken: family, stop tokens, what is proved."),
    ("doctor", "Probe this machine; each finding comes with its fix."),
    ("bench", "Measure, with rivals in the same run."),
)

QUIETLY: dict[str, Any] = {
    "exit_on_error": False,
    "print_error": False,
    "result_action": "return_value",
}
"""How cyclopts is called: errors and answers come back to `dispatch`."""

_MODULES = {
    "import": "commands.import_:import_",
    "eval": "commands.evaluate:evaluate",
    "demo": "demo.command:demo",
}
"""Commands that do not live in `commands/NAME.py`."""


def _version() -> str:
    from prorl import __version__

    return __version__


def build() -> App:
    """The command tree; nothing of a command is imported before it is called."""
    app = App(
        name="prorl",
        help="Rollout-as-a-Service for multi-turn LLM agents, on Apache Arrow.",
        version=_version,
        help_format="plaintext",
    )
    for name, line in COMMANDS:
        module = _MODULES.get(name, f"commands.{name}:{name}")
        app.command(f"prorl.cli.{module}", name=name, help=line)
    return app


def dispatch(argv: Sequence[str]) -> int:
    """Run one command line; returns its exit code and never raises for a mistake of the caller."""
    try:
        _check_environment()
        _check_command(argv)
        answer = build()(list(argv), **QUIETLY)
        sys.stdout.flush()
        return answer if isinstance(answer, int) else DONE
    except CycloptsError as error:
        from prorl.cli.usage import refused

        return _complain(refused(error), MISTAKE)
    except (UserError, NotFoundError) as error:
        return _complain(error, MISTAKE)
    except ProrlError as error:
        return _complain(error, FAILED)
    except KeyboardInterrupt:
        return _complain("interrupted", INTERRUPTED)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED


def _check_command(argv: Sequence[str]) -> None:
    """Refuse an unknown command before cyclopts would load every command to look for it."""
    known = [name for name, _ in COMMANDS]
    if argv and not argv[0].startswith("-") and argv[0] not in known:
        from prorl.cli.usage import nearest

        raise UserError(
            f"unknown command `{argv[0]}`", f"one of {', '.join(known)}", nearest(argv[0], known)
        )


def _check_environment() -> None:
    """Refuse faults that nobody can mean, before a process meets them in the middle of its work."""
    if os.environ.get(VARIABLE):
        from prorl.config import check_failpoints

        check_failpoints()


def _complain(error: object, code: int) -> int:
    from prorl.cli.output import clean

    line = " ".join(clean(str(error)).splitlines())
    print(f"error: {line}", file=sys.stderr)
    return code
