"""`prorl view`: stored runs in the browser of this host."""

from __future__ import annotations

import asyncio
import contextlib

from prorl.cli.options import RunsRoot
from prorl.cli.output import say
from prorl.cli.runs import run_directory
from prorl.storage.files.runs import is_run, list_runs
from prorl.view.server import Library, listen, user_name


def view(
    run: str = "",
    /,
    *,
    root: RunsRoot = "prorl-runs",
    port: int = 0,
    tokenizer: str = "",
) -> int:
    """Show stored and live runs in the browser: charts, rollouts, exact tokens, SQL, annotations.

    Serves only this host, at an address with a token. Run directories may be copies.
    Elsewhere: `ssh -L PORT:127.0.0.1:PORT HOST`.

    Example: prorl view my-run

    Example: prorl view s3://bucket/runs --port 7788

    Parameters
    ----------
    run
        A run's name or directory, or a folder of runs. Default: all runs of the root.
    port
        Port to listen on. Default: any free one.
    tokenizer
        Directory of the tokenizer that spells tokens. Default: the one that the run names.
    """
    where = run or root
    if run and (is_run(run) or not list_runs(run)):
        where = run_directory(run, root)
    listening = listen(Library.at(where, tokenizer), port, user_name())
    say(f"look at  {listening.url}")
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(listening.serve())
    return 0
