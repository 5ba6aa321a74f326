"""The report of a benchmark: rows of figures with their rivals, as text and as JSON.

The JSON is `{"bench", "machine", "rows": [{"name", "value", "unit", "repeats", "cpu_s", "rival",
"rival_value", "rival_command", "ratio"}]}`, plus `note` on rows that have one (a rival that is not
installed, a bar that was missed). `ratio` is how many times better we are than the rival: above 1
we win, whichever direction is better for the unit. Nothing here measures anything.
"""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from prorl.types import Json


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    name: str
    """Stable name, e.g. `handoff_p50_ms`."""
    value: float
    unit: str
    repeats: tuple[float, ...] = ()
    """Raw values that `value` summarises."""
    cpu_s: float = 0.0
    """CPU seconds that the measurement used, over all processes."""
    rival: str = ""
    rival_value: float | None = None
    rival_command: str = ""
    """Reproduces the rival's value."""
    ratio: float | None = None
    note: str = ""

    def beside(
        self, rival: str, value: float, command: str = "", *, more_is_better: bool = False
    ) -> Figure:
        """The same figure with a rival's value.

        >>> mine = Figure(name="start", value=2.0, unit="ms")
        >>> mine.beside("theirs", 6.0).ratio, mine.beside("t", 6.0, more_is_better=True).ratio
        (3.0, 0.3333333333333333)
        """
        ratio = self.value / value if more_is_better else value / self.value
        return replace(self, rival=rival, rival_value=value, rival_command=command, ratio=ratio)

    def to_json(self) -> dict[str, Json]:
        """The figure as JSON values; `note` only where there is one."""
        row = asdict(self)
        row["repeats"] = list(self.repeats)
        if not self.note:
            del row["note"]
        return row


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    bench: str
    rows: tuple[Figure, ...]
    machine: dict[str, Json] = field(default_factory=lambda: machine())

    def to_json(self) -> dict[str, Json]:
        return {
            "bench": self.bench,
            "machine": self.machine,
            "rows": [row.to_json() for row in self.rows],
        }


def cells(row: Figure) -> dict[str, str]:
    """A row's text by column, empty where there is nothing to say."""
    return {
        "name": row.name,
        "value": number(row.value),
        "unit": row.unit,
        "min..max": spread(row.repeats),
        "cpu s": number(row.cpu_s) if row.cpu_s else "",
        "rival": row.rival,
        "rival value": "" if row.rival_value is None else number(row.rival_value),
        "ratio": "" if row.ratio is None else f"{number(row.ratio)}x",
    }


def median(
    name: str, values: Sequence[float], unit: str, *, cpu_s: float = 0.0, note: str = ""
) -> Figure:
    """Row of the median of at least one raw value.

    >>> median("start_ms", [3.0, 1.0, 2.0], "ms").value
    2.0
    """
    return Figure(
        name=name,
        value=statistics.median(values),
        unit=unit,
        repeats=tuple(values),
        cpu_s=cpu_s,
        note=note,
    )


def verdict(value: float, bar: float) -> str:
    """Returns whether a value that should be small is.

    >>> verdict(0.3, 0.5), verdict(0.7, 0.5)
    ('bar 0.5: met', 'bar 0.5: missed')
    """
    return f"bar {bar:.3g}: {'met' if value <= bar else 'missed'}"


def number(value: float) -> str:
    """Three significant digits for people.

    >>> number(0.012345), number(1234.5), number(7.0)
    ('0.0123', '1,234', '7')
    """
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def spread(values: Iterable[float]) -> str:
    """Smallest and largest raw value, empty for fewer than two."""
    values = tuple(values)
    return f"{number(min(values))}..{number(max(values))}" if len(values) > 1 else ""


def machine() -> dict[str, Json]:
    """Returns what the figures were measured on: processor, cores that we may use, memory,
    versions.
    """
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        **{name: _version(name) for name in ("prorl", "pyarrow", "duckdb")},
    }


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")),
        platform.machine(),
    )


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
