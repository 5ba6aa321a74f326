"""The run directory: what lies where, and what a reader may open.

    RUN/manifest.json                        config, hashes and versions; the gateway writes it
    RUN/commits/0000000001.json              one per commit: the files that it made visible, with rows, bytes, sha256
    RUN/{sequences,rollouts,turns,messages,groups,tasks}/PART.parquet
    RUN/<table>/empty.parquet                no rows: plain globs work from the first moment on
    RUN/partial/ROLLOUT-ATTEMPT.parquet      attempts that did not commit, in SCORED's shape, outside every view

Invariants: a commit names whole files that never change; every row of a table is in exactly one
named file; commits are numbered densely from 1. A file that no commit names does not exist for a
reader (a crash may leave some; `RunDir.sweep` removes them). A file that a commit on disk names is
never removed, whatever the log says. Everything goes through fsspec, so
that a run directory may lie in an object store; a copied one works like the original.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import fsspec
import orjson
from fsspec.implementations.local import LocalFileSystem

from prorl.control import PartFile as PartFile
from prorl.errors import ConflictError, NotFoundError, SchemaError
from prorl.schema import SCHEMA_VERSION, TABLES, check_version
from prorl.storage.publish import TEMP_MARK, Publish, publish, sync_directory
from prorl.types import Json

COMMITS = "commits"
PARTIAL = "partial"
MANIFEST = "manifest.json"
EMPTY = "empty.parquet"


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """The files that one transaction of the control log made visible."""

    commit_seq: int
    part: str
    files: tuple[PartFile, ...]
    run_id: str
    schema_version: int = SCHEMA_VERSION

    def dumps(self) -> bytes:
        """As the content of `commits/<seq>.json`; equal commits give equal bytes."""
        return orjson.dumps(asdict(self), option=orjson.OPT_SORT_KEYS | orjson.OPT_INDENT_2) + b"\n"

    @classmethod
    def loads(cls, data: bytes, where: str) -> Commit:
        """Inverse of `dumps`.

        Raises SchemaError for a newer version or a file that is no commit.
        """
        try:
            values = orjson.loads(data)
            check_version(values["schema_version"], where)
            files = tuple(PartFile(**file) for file in values.pop("files"))
            return cls(files=files, **values)
        except (orjson.JSONDecodeError, TypeError, KeyError) as error:
            raise SchemaError(f"{where}: {error}", "a commit as prorl writes it") from None


class RunDir:
    """A run directory on any fsspec filesystem: paths, commits, sweeping. Holds no open file."""

    def __init__(self, where: str | Path) -> None:
        fs, root = fsspec.core.url_to_fs(str(where))
        self.fs: Any = fs
        self.root: str = root.rstrip("/")

    @property
    def name(self) -> str:
        """Last component of the path."""
        return self.root.rsplit("/", 1)[-1]

    @property
    def local(self) -> bool:
        """Whether it lies on this host's filesystem."""
        return isinstance(self.fs, LocalFileSystem)

    def path(self, *names: str) -> str:
        """Absolute path of something in it."""
        return "/".join((self.root, *names))

    def create(self, empties: Iterable[tuple[str, Any]], publish: Publish = publish) -> None:
        """Make the directories and one empty part per table; what is there stays. Idempotent."""
        for name in (COMMITS, PARTIAL, *TABLES):
            self.fs.makedirs(self.path(name), exist_ok=True)
        if self.local:
            sync_directory(Path(self.root))
        for table, content in empties:
            if not self.fs.exists(self.path(table, EMPTY)):
                publish(self.fs, self.path(table, EMPTY), content)

    def manifest(self) -> dict[str, Json]:
        """The manifest.

        Raises NotFoundError when this is no run directory, SchemaError when it is of another
        version.
        """
        try:
            values = orjson.loads(self.fs.cat_file(self.path(MANIFEST)))
        except (FileNotFoundError, NotADirectoryError):
            raise NotFoundError(
                f"{self.root} is no run directory: it holds no {MANIFEST}"
            ) from None
        except orjson.JSONDecodeError as error:
            raise SchemaError(
                f"{self.path(MANIFEST)} is not JSON: {error}", "a manifest as prorl writes it"
            ) from None
        check_version(
            values.get("schema_version") if isinstance(values, dict) else None,
            f"run directory {self.root}",
        )
        return dict(values)

    def commit_path(self, commit_seq: int) -> str:
        """Where a commit is published; names sort in commit order."""
        return self.path(COMMITS, f"{commit_seq:010d}.json")

    def commits(self) -> list[Commit]:
        """Every published commit, in order.

        Raises SchemaError for one that this code cannot read.
        """
        names = [
            name
            for name in self.names(COMMITS)
            if name.endswith(".json") and not name.startswith(TEMP_MARK)
        ]
        paths = [self.path(COMMITS, name) for name in sorted(names)]
        return [Commit.loads(self.fs.cat_file(path), path) for path in paths]

    def check_known(self, num_commits: int) -> None:
        """Raises ConflictError when the directory holds commits that a log with that many does not
        know: it is older than the directory, or not its log at all.
        """
        self.fs.invalidate_cache()
        beyond = self.commit_path(num_commits + 1)
        if self.fs.exists(beyond):
            raise ConflictError(
                f"{beyond} is there, and the control log knows {num_commits} commits of the run",
                "the log that wrote this directory",
                "move the directory to a root of its own and `prorl adopt` it there",
            )

    def written(self) -> bool:
        """Whether a store has ever made something durable here: a commit or a part."""
        return any(
            not name.startswith(TEMP_MARK) and name != EMPTY
            for folder in (COMMITS, *TABLES)
            for name in self.names(folder)
        )

    def sweep(self, parts: Collection[str]) -> list[str]:
        """Remove what a dead writer left: temporary files, and parts whose name is neither in
        `parts` nor in a commit on disk.

        Touches nothing else. Raises SchemaError for a commit that it cannot read.
        """
        stale = [
            f"{folder}/{name}"
            for folder in (COMMITS, PARTIAL, *TABLES)
            for name in self.names(folder)
            if name.startswith(TEMP_MARK)
            or (
                folder in TABLES
                and name.startswith("part-")
                and name.removesuffix(".parquet") not in parts
            )
        ]
        named = {file.path for commit in self.commits() for file in commit.files} if stale else {}
        removed = [path for path in stale if path not in named]
        for path in removed:
            self.fs.rm_file(self.path(path))
        return removed

    def names(self, folder: str) -> Iterator[str]:
        """What lies in a folder of the run; nothing when there is no such folder."""
        self.fs.invalidate_cache()
        if self.fs.exists(self.path(folder)):
            yield from (
                str(path).rsplit("/", 1)[-1] for path in self.fs.ls(self.path(folder), detail=False)
            )
