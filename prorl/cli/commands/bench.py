"""`prorl bench NAME`: measure, with rivals in the same run."""

from __future__ import annotations

import asyncio
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from prorl.cli.options import Flag, JsonObject
from prorl.cli.output import say, say_json, table
from prorl.cli.usage import nearest
from prorl.errors import UserError

if TYPE_CHECKING:
    from prorl.bench.report import Report


def bench(
    name: str = "", /, *, device: str = "", json: JsonObject = False, quick: Flag = False
) -> int:
    """Run a benchmark, with other frameworks in the same run, and print a table of all figures.

    Example: prorl bench pipeline --quick

    Parameters
    ----------
    name
        Name of the benchmark; without one they are listed.
    device
        For `stream`: cuda adds the way into a GPU's memory.
    quick
        End within 50 s on two cores.
    """
    if not name:
        say("\n".join(benches()))
        return 0
    names = benches()
    if name not in names:
        expected = f"one of {', '.join(names)}"
        raise UserError(f"unknown benchmark {name!r}", expected, nearest(name, names))
    if device and name != "stream":
        raise UserError(f"--device {device} for bench {name}", "bench stream, which alone takes it")
    options = {"device": device} if device else {}
    report = asyncio.run(import_module(f"prorl.bench.{name}").run(quick, **options))
    if json:
        say_json(report.to_json())
    else:
        show(report)
    return 0


def show(report: Report) -> None:
    """Print the figures without empty columns, the notes, the machine."""
    from prorl.bench.report import cells

    rows = [cells(row) for row in report.rows]
    columns = [name for name in rows[0] if any(row[name] for row in rows)]
    table(columns, ([row[name] for name in columns] for row in rows), title=f"bench {report.bench}")
    for row in report.rows:
        if row.note:
            say(f"{row.name}: {row.note}")
    say("  ".join(f"{name} {value}" for name, value in report.machine.items()))


def benches() -> list[str]:
    """Every module of `prorl.bench` that can be run, found without importing any."""
    import prorl.bench

    files = (file for folder in prorl.bench.__path__ for file in Path(folder).glob("*.py"))
    return sorted(file.stem for file in files if "\nasync def run(quick" in file.read_text())
