"""The command line: `prorl COMMAND`.

Every command loads its own module only when it is called, so `prorl --help` stays quick.

    app.py       the commands, and how errors become one line and an exit code
    settings.py  default < file < environment < flag -> a job or a service config
    options.py   options that several commands share, each with its help
    output.py    terminal or plain lines or JSON; control characters never reach the terminal
    job.py       a task file as one run, checked before anything is started
    run_job.py   start a service, submit the job, follow it to its end
    progress.py  bars on a terminal while a run goes on, plain lines off it
    summary.py   what a run was, read back from its Parquet files by SQL
    usage.py     words for a mistake on the command line
    probes.py    what `prorl doctor` looks at

Exit codes: 0 done, 1 it failed, 2 the caller's mistake (one line says which), 130 interrupted.
"""

from __future__ import annotations

import sys


def main() -> None:
    try:
        from prorl.cli.app import dispatch

        code = dispatch(sys.argv[1:])
    except ModuleNotFoundError as error:
        if (error.name or "prorl").partition(".")[0] == "prorl":
            raise
        print(
            f"error: {error.name} is not installed: this is the client alone; expected the extra"
            " `serve`, with the command line and the service; pip install 'prorl[serve]'",
            file=sys.stderr,
        )
        code = 2
    except KeyboardInterrupt:  # among imports, or while the last words were said
        print("error: interrupted", file=sys.stderr)
        code = 130
    sys.exit(code)
