"""The commands by name and help line; here alone an error becomes one line and an exit code."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence
from typing import Any

from cyclopts import App, CycloptsError, Parameter

from prorl.cli.help_text import WrappedHelp
from prorl.errors import NotFoundError, ProrlError, UserError
from prorl.linux.failpoints import VARIABLE

DONE, FAILED, MISTAKE, INTERRUPTED = 0, 1, 2, 130

COMMANDS = {
    "demo": "A tiny policy learns to use tools, in two and a half minutes.",
    "run": "Run a task file, with a service of its own.",
    "eval": "Measure pass@k of a policy, or regrade a stored run.",
    "new": "Start an env of your own from a working template.",
    "check": "Check tasks: the oracle scores 1, a no-op answer 0.",
    "sandbox": "Open a terminal in a task's sandbox, as INIT makes it.",
    "serve": "Start a long-running service, over HTTP and Flight.",
    "cluster": "Start nodes for a service by Dask: here, Slurm, PBS ...",
    "node": "Work for a service on another host, or drain a node.",
    "status": "Show what a service is doing, once or repeatedly.",
    "backends": "Model servers of a service: ls, add, rm, drain, set.",
    "token": "Access tokens and join files for other hosts: new, ls.",
    "show": "List runs, or show one run, or one rollout's transcript.",
    "view": "Open runs in the browser: charts, rollouts, tokens.",
    "sql": "Run one SELECT over stored runs.",
    "verify": "Check a run directory: hashes, invariants, one row each.",
    "report": "Write a run's analyses to one HTML file, or compare two.",
    "track": "Send a run's curves to W&B or TensorBoard, or its traces.",
    "backup": "Copy a root while its service works; another goes on from it.",
    "gc": "Merge small files, delete replaced ones, drop runs.",
    "replay": "Serve a stored run to trainers, in its order.",
    "export": "Write a stored run as chat, verl, TRL, ATIF or HF data.",
    "schema": "Print the columns of all tables, or keys of configs.",
    "image": "Manage images for sandboxes: pull, build, ls, du, rm, gc.",
    "doctor": "Probe this machine, or a model's directory, with fixes.",
    "bench": "Run a benchmark, with other frameworks beside it.",
}

QUIETLY: dict[str, Any] = {
    "exit_on_error": False,
    "print_error": False,
    "result_action": "return_value",
}
"""The arguments of cyclopts: errors and answers come back to `dispatch`."""

_MODULES = {
    "eval": "commands.evaluate:evaluate",
    "demo": "demo.command:demo",
}
"""Commands that do not live in `commands/NAME.py`."""


def _version() -> str:
    from prorl import __version__

    return __version__


def build(called: str = "") -> App:
    """The command tree; nothing of a command is imported before it is called.

    The help of the one that is called is its docstring, examples and all.
    """
    app = App(
        name="prorl",
        help="Rollout-as-a-Service for multi-turn LLM agents, on Apache Arrow.",
        version=_version,
        help_format="plaintext",
        help_formatter=WrappedHelp(),
        default_parameter=Parameter(negative=""),
    )
    for place, (name, line) in enumerate(COMMANDS.items()):
        module = _MODULES.get(name, f"commands.{name}:{name}")
        app.command(
            f"prorl.cli.{module}", name=name, help=None if name == called else line, sort_key=place
        )
    return app


def dispatch(argv: Sequence[str]) -> int:
    """Run one command line; returns its exit code and never raises for a mistake of the caller."""
    try:
        # Refuse faults that nobody can mean, before a process meets them in the middle of its
        # work.
        if os.environ.get(VARIABLE):
            from prorl.config import check_failpoints

            check_failpoints()
        # Refuse an unknown command before cyclopts would load every command to look for it.
        if argv and not argv[0].startswith("-") and argv[0] not in COMMANDS:
            from prorl.cli.usage import nearest

            raise UserError(
                f"unknown command `{argv[0]}`",
                f"one of {', '.join(COMMANDS)}",
                nearest(argv[0], COMMANDS),
            )
        answer = build(argv[0] if argv else "")(list(argv), **QUIETLY)
        sys.stdout.flush()
        return answer if isinstance(answer, int) else DONE
    except CycloptsError as error:
        from prorl.cli.usage import refused

        return _complain(refused(error), MISTAKE)
    except (UserError, NotFoundError) as error:
        return _complain(error, MISTAKE)
    except ProrlError as error:
        return _complain(error, FAILED)
    except PermissionError as error:
        return _complain(f"{error.filename}: no right to read or write it; ask its owner", MISTAKE)
    except KeyboardInterrupt:
        return _complain("interrupted", INTERRUPTED)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
            raise
        where = error.filename or "a file under the root or in the temporary folder"
        return _complain(f"cannot write {where}: {error.strerror}; `df` says which disk", FAILED)


def _complain(error: object, code: int) -> int:
    from prorl.cli.output import clean, note

    note(f"error: {' '.join(clean(str(error)).splitlines())}")
    return code
