"""`prorl bench NAME`: measure, with rivals in the same run."""

from __future__ import annotations

import asyncio
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from prorl.cli.options import Flag, JsonObject
from prorl.cli.output import is_terminal, say, say_json
from prorl.cli.usage import nearest
from prorl.errors import UserError

if TYPE_CHECKING:
    from prorl.bench.report import Report


def bench(name: str = "", /, *, json: JsonObject = False, quick: Flag = False) -> int:
    """Measure, with rivals in the same run: prints a table, losing rows included.

    Example: prorl bench pipeline --quick

    Parameters
    ----------
    name
        Which one; without a name they are listed.
    quick
        End within 50 s on two cores.
    """
    if not name:
        say("\n".join(benches()))
        return 0
    _check(name)
    report = asyncio.run(import_module(f"prorl.bench.{name}").run(quick))
    if json:
        say_json(report.to_json())
    else:
        _print(report)
    return 0


def _check(name: str) -> None:
    names = benches()
    if name not in names:
        known = f"one of {', '.join(names)}"
        raise UserError(f"unknown benchmark {name!r}", known, nearest(name, names))


def _print(report: Report) -> None:
    from rich.console import Console

    Console(width=None if is_terminal() else 200).print(report.table())


def benches() -> list[str]:
    """Every module of `prorl.bench` that can be run, found without importing any."""
    import prorl.bench

    files = (file for folder in prorl.bench.__path__ for file in Path(folder).glob("*.py"))
    return sorted(file.stem for file in files if "\nasync def run(quick" in file.read_text())
