"""`prorl bench NAME`: measure, with rivals in the same run."""

from __future__ import annotations

import asyncio
import difflib
from importlib import import_module
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from prorl.cli.output import is_terminal, say, say_json
from prorl.errors import UserError


def bench(
    name: str = "",
    /,
    *,
    json: Annotated[bool, Parameter(negative="")] = False,
    quick: Annotated[bool, Parameter(negative="")] = False,
) -> int:
    """Measure, with rivals in the same run: prints a table, losing rows included.

    Example: prorl bench pipeline --quick

    Parameters
    ----------
    name
        Which one; without a name they are listed.
    json
        Print one JSON object instead of the table.
    quick
        End within 50 s on two cores.
    """
    names = benches()
    if not name:
        for known in names:
            say(known)
        return 0
    if name not in names:
        close = difflib.get_close_matches(name, names, n=1)
        raise UserError(
            f"unknown benchmark {name!r}",
            f"one of {', '.join(names)}",
            f"did you mean `{close[0]}`?" if close else "",
        )
    report = asyncio.run(import_module(f"prorl.bench.{name}").run(quick))
    if json:
        say_json(report.to_json())
    else:
        from rich.console import Console

        Console(width=None if is_terminal() else 200).print(report.table())
    return 0


def benches() -> list[str]:
    """Every module of `prorl.bench` that can be run, found without importing any."""
    import prorl.bench

    files = (file for folder in prorl.bench.__path__ for file in Path(folder).glob("*.py"))
    return sorted(file.stem for file in files if "\nasync def run(quick" in file.read_text())
