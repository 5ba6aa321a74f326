"""Lists the runs below a root, on a disk or in an object store."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from prorl.errors import RolloutError, UserError, boundary
from prorl.states import FailureCode
from prorl.storage.files.layout import MANIFEST, RunDir
from prorl.storage.files.objects import ask


@contextmanager
def _reachable(where: str | Path) -> Iterator[None]:
    """Turns what an object store's client raises, missing credentials too, into UserError."""
    try:
        with boundary(RolloutError, FailureCode.STAGE_ERROR, f"{where} cannot be read"):
            yield
    except RolloutError as cause:
        raise UserError(
            cause.message, "a bucket that can be reached", "see its name and your credentials"
        ) from cause


def is_run(where: str | Path) -> bool:
    """Returns whether `where`, a path or a URL, looks like a run directory."""
    if not is_url(where):
        return (Path(where) / MANIFEST).is_file()
    with _reachable(where):
        run = RunDir(where)
        run.fs.invalidate_cache()
        return run.has(MANIFEST)


def list_runs(root: str | Path) -> list[str]:
    if not is_url(root):
        paths = [p for p in Path(root).iterdir() if p.name[0] != "."] if Path(root).is_dir() else []
        mtimes = {p.name: (p / MANIFEST).stat().st_mtime for p in paths if is_run(p)}
        return sorted(mtimes, key=mtimes.__getitem__)
    with _reachable(root):
        folder = RunDir(root)
        folder.fs.invalidate_cache()
        pattern = folder.path("*", MANIFEST)
        manifests = ask(folder.fs, lambda: folder.fs.glob(pattern, detail=True)).values()
    newest_last = sorted(
        manifests, key=lambda info: str(info.get("LastModified", info.get("mtime")))
    )
    return [str(info["name"]).split("/")[-2] for info in newest_last]


def below(root: str | Path, name: str) -> str:
    return f"{str(root).rstrip('/')}/{name}"


def is_url(where: str | Path) -> bool:
    return "://" in str(where)
