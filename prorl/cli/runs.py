"""Finding a stored run by its name in a root or by its path."""

from __future__ import annotations

import shlex
from itertools import count
from pathlib import Path

from prorl.cli.usage import nearest
from prorl.errors import ConfigError, NotFoundError

DEFAULT_ROOT = Path("prorl-runs")


def root_option(root: Path) -> str:
    """` --root ROOT` for a command line that a person is shown; empty for the usual root."""
    return "" if root.absolute() == DEFAULT_ROOT.absolute() else f" --root {shlex.quote(str(root))}"


def first_free(root: Path, stem: str) -> str:
    """The first of `stem-1`, `stem-2` ... that no run of the root has."""
    return next(name for n in count(1) if not (root / (name := f"{stem}-{n}")).exists())


def latest_run(root: Path, marker: str) -> str:
    """Name of the run of `root` whose file `marker` was written last: what `--resume` goes on with.

    Raises ConfigError when there is none.
    """
    files = sorted(root.glob(f"*/{marker}"), key=lambda path: path.stat().st_mtime)
    if not files:
        raise ConfigError(
            f"nothing to resume in {root}",
            "a root with an interrupted run",
            "name another root with --root",
        )
    return files[-1].parent.name


def run_directory(run: str, root: str | Path) -> str:
    """Returns where a run is stored, as a path or a URL.

    `run` is that of a run directory, or a name in `root`. Raises NotFoundError with the nearest
    name.
    """
    from prorl.storage.files.runs import below, is_run, is_url, list_runs

    candidates = [run] if is_url(run) else [below(root, run), run]
    for candidate in candidates:
        if is_run(candidate):
            return candidate
    folder = "" if is_url(run) else str(Path(run).parent)
    is_path = folder not in ("", ".") and bool(list_runs(folder))
    place = folder if is_path else root  # the hint to a path names the runs beside it
    names = list_runs(place)
    hint = nearest(Path(run).name, names) or f"runs there: {', '.join(names[-5:]) or 'none'}"
    raise NotFoundError(
        f"no run {run!r} in {place}: expected a name in it or the path of a run directory; {hint}"
    )
