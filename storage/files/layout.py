"""The run directory: what lies where, and what a reader may open.

    RUN/manifest.json                        config, hashes and versions; the gateway writes it
    RUN/commits/0000000001.json              one per commit: the files that it made visible, with
                                             rows, bytes, sha256, first and last rollout_id
    RUN/commits/0000000001-0000000256.json   commits 1 to 256 compacted: the files that hold their
                                             rows now; `-0002` before `.json`: compacted again
    RUN/{sequences,rollouts,turns,messages,groups,tasks,routed_experts,attempts}/PART.parquet
    RUN/<table>/empty.parquet                no rows: plain globs work from the first moment on
    RUN/{trained,annotations,versions,scores,metrics}/0000000001.parquet
                                         what was appended beside the commits (`appended.py`)
    RUN/partial/cut-<16 hex>.parquet         attempts that did not commit, in SCORED's shape,
                                             outside every view

Invariants: a commit names whole files that never change; every row of a table is in exactly one
named file; commits are numbered densely from 1. The longest range of compacted commits stands for
all commits that it covers, from the moment at which its name appears (`keep/compact.py`): a reader
opens it and the commits after it, nothing else. A file that no such commit names does not exist for
a reader: a crash may leave some (`RunDir.sweep` and `compact.collect` remove them), and files that
a range has replaced stay for a while for readers who opened the run before (so a plain glob may
count rows twice until then). A file that such a commit names is never removed, whatever the log
says. Everything goes through fsspec, so that a run directory may lie in an object store; a copied
one works like the original.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import fsspec
import orjson
import pyarrow.fs as pafs
from fsspec.implementations.local import LocalFileSystem

from prorl.control import PartFile as PartFile
from prorl.errors import ForeignDirectoryError, NotFoundError, SchemaError, StorageError
from prorl.linux import locks
from prorl.linux.files import sync_directory
from prorl.pluralize import pluralize
from prorl.schema import TABLES, check_version
from prorl.schema.fields import SCHEMA_VERSION
from prorl.storage.files.durable import TEMP_MARK, WriteDurably, write_durably
from prorl.storage.files.objects import ObjectFiles, ask, remove
from prorl.types import Json

COMMITS = "commits"
PARTIAL = "partial"
MANIFEST = "manifest.json"
EMPTY = "empty.parquet"


def manifest_digest(values: Mapping[str, Json]) -> str:
    """Returns what a manifest says of itself as `digest`: SHA-256 of everything else in it."""
    rest = {name: value for name, value in values.items() if name != "digest"}
    return hashlib.sha256(orjson.dumps(rest, option=orjson.OPT_SORT_KEYS)).hexdigest()


def check_manifest(values: Json, where: str) -> None:
    """Raise SchemaError, which names the prorl to read it with, for a run of another version."""
    manifest = values if isinstance(values, dict) else {}
    version = manifest.get("schema_version")
    if version != SCHEMA_VERSION:
        raise SchemaError(
            f"{where} was written by prorl {manifest.get('code_version', 'of unknown version')}"
            f" (schema {version})",
            f"schema {SCHEMA_VERSION}",
            "read it with that version",
        )


_LIST_AGAIN = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """The files that one transaction of the control log made visible."""

    commit_seq: int
    part: str
    files: tuple[PartFile, ...]
    run_id: str
    schema_version: int = SCHEMA_VERSION
    first_seq: int = 0
    """The first commit of a range of compacted commits: the first one that it stands for, always 1.
    Else 0.
    """
    again: int = 0
    """The count of a range: how often the same commits had been compacted before."""

    @property
    def name(self) -> CommitName:
        return CommitName(self.first_seq, self.commit_seq, self.again)

    def dumps(self) -> bytes:
        """Equal commits give equal bytes."""
        values = asdict(self)
        for name in ("first_seq", "again"):
            if not values[name]:
                del values[name]
        for file in values["files"]:
            if file["first"] < 0:
                del file["first"], file["last"]
        return orjson.dumps(values, option=orjson.OPT_SORT_KEYS | orjson.OPT_INDENT_2) + b"\n"

    @classmethod
    def loads(cls, data: bytes, where: str) -> Commit:
        """Raises SchemaError for a newer version or a file that is no commit."""
        try:
            values = orjson.loads(data)
            check_version(values["schema_version"], where)
            files = tuple(PartFile(**file) for file in values.pop("files"))
            return cls(files=files, **values)
        except (orjson.JSONDecodeError, TypeError, KeyError) as error:
            raise SchemaError(f"{where}: {error}", "a commit as prorl writes it") from None


class CommitName(NamedTuple):
    """Holds what a commit's file is called.

    >>> str(CommitName(0, 7)), str(CommitName(1, 7))
    ('0000000007.json', '0000000001-0000000007.json')
    >>> CommitName.parse("0000000001-0000000007.json")
    CommitName(first=1, last=7, again=0)
    """

    first: int
    """The first commit of a range; 0 for one commit."""
    last: int
    again: int = 0
    """The count of a range: see `Commit.again`."""

    def __str__(self) -> str:
        start = f"{self.first:010d}-" if self.first else ""
        end = f"-{self.again:04d}" if self.again else ""
        return f"{start}{self.last:010d}{end}.json"

    @classmethod
    def parse(cls, name: str) -> CommitName | None:
        """Parses a commit's file name; returns None for any other name."""
        match = _COMMIT_NAME.fullmatch(name)
        return cls(int(match[1] or 0), int(match[2]), int(match[3] or 0)) if match else None


_COMMIT_NAME = re.compile(r"(?:(\d{10})-)?(\d{10})(?:-(\d{4}))?\.json")


class RunDir:
    """A run directory on any fsspec filesystem: paths, commits, sweeping. Holds no open file."""

    def __init__(self, where: str | Path) -> None:
        fs, root = fsspec.core.url_to_fs(str(where))
        self.where = str(where)
        """Path or URL, as another process would open it."""
        self.fs: Any = fs
        self.root: str = root.rstrip("/")

    @property
    def name(self) -> str:
        return self.root.rsplit("/", 1)[-1]

    @property
    def arrow_filesystem(self) -> Any:
        return pafs.LocalFileSystem() if self.local else pafs.PyFileSystem(ObjectFiles(self.fs))

    @property
    def local(self) -> bool:
        return isinstance(self.fs, LocalFileSystem)

    def path(self, *names: str) -> str:
        return "/".join((self.root, *names))

    def has(self, *names: str) -> bool:
        """An object store that is busy is asked again (`ask`), here and below."""
        return bool(ask(self.fs, lambda: self.fs.exists(self.path(*names))))

    def size(self, *names: str) -> int:
        """Returns the size in bytes. Raises FileNotFoundError, OSError."""
        return int(ask(self.fs, lambda: self.fs.size(self.path(*names))))

    def modified_at(self, *names: str) -> float:
        """Returns seconds since the epoch. Raises as `size` does."""
        return float(ask(self.fs, lambda: self.fs.modified(self.path(*names))).timestamp())

    def read(self, *names: str) -> bytes:
        """Raises as `size`."""
        return bytes(ask(self.fs, lambda: self.fs.cat_file(self.path(*names))))

    def open(self, *names: str) -> Any:
        """Opens it for reading. Raises as `size` does."""
        return ask(self.fs, lambda: self.fs.open(self.path(*names), "rb"))

    def create(
        self, empties: Iterable[tuple[str, Any]], write: WriteDurably = write_durably
    ) -> None:
        """Directories and one empty part per table; what is there stays. Idempotent."""
        for name in (COMMITS, PARTIAL, *TABLES):
            self.fs.makedirs(self.path(name), exist_ok=True)
        if self.local:
            sync_directory(Path(self.root))
        for table, content in empties:
            if not self.has(table, EMPTY):
                write(self.fs, self.path(table, EMPTY), content)

    def manifest(self) -> dict[str, Json]:
        """Raises NotFoundError for what is no run directory, SchemaError for another version."""
        try:
            values = orjson.loads(self.read(MANIFEST))
        except (FileNotFoundError, NotADirectoryError):
            raise NotFoundError(
                f"{self.root} is no run directory: it holds no {MANIFEST}"
            ) from None
        except orjson.JSONDecodeError as error:
            raise SchemaError(
                f"{self.path(MANIFEST)} is not JSON: {error}", "a manifest as prorl writes it"
            ) from None
        check_manifest(values, f"run directory {self.root}")
        return dict(values)

    def commit_path(self, commit_seq: int, first_seq: int = 0, again: int = 0) -> str:
        """Returns where a commit, or a range of compacted ones, is published."""
        return self.path(COMMITS, str(CommitName(first_seq, commit_seq, again)))

    def commit_names(self) -> list[CommitName]:
        """Commits and ranges that are published, in order of the last commit in each."""
        names = (CommitName.parse(name) for name in self.names(COMMITS))
        order = sorted((name.last, name.first, name.again) for name in names if name)
        return [CommitName(first, last, again) for last, first, again in order]

    def current_names(self) -> list[CommitName]:
        """Returns the commits that readers open: the range as compacted last, and what follows."""
        names = self.commit_names()
        ranges = [name for name in names if name.first]
        upto = ranges[-1].last if ranges else 0
        return [*ranges[-1:], *(name for name in names if not name.first and name.last > upto)]

    def commits(self, known: Iterable[Commit] = ()) -> list[Commit]:
        """Returns the commits of `current_names`; those of `known` are not read again. Raises
        SchemaError for one that this code cannot read.
        """
        by_name = {commit.name: commit for commit in known}
        for _ in range(_LIST_AGAIN):
            try:
                names = self.current_names()
                new = self.read_commits([name for name in names if name not in by_name])
                by_name |= {commit.name: commit for commit in new}
                return [by_name[name] for name in names]
            except FileNotFoundError:
                # Compacted and removed between our listing and our reading.
                continue
        raise StorageError(f"{self.path(COMMITS)} changes faster than it can be read")

    def read_commits(self, names: Sequence[CommitName]) -> list[Commit]:
        """Raises FileNotFoundError when one is gone, SchemaError as `commits`."""
        paths = [self.path(COMMITS, str(name)) for name in names]
        if self.local or not paths:
            contents = [self.fs.cat_file(path) for path in paths]
        else:
            by_path = ask(self.fs, lambda: self.fs.cat(paths))
            contents = [by_path[path] for path in paths]
        return [Commit.loads(content, path) for content, path in zip(contents, paths, strict=True)]

    def compacted(self) -> CommitName:
        """The range that readers open; of no commit when nothing is compacted."""
        ranges = [name for name in self.commit_names() if name.first]
        return ranges[-1] if ranges else CommitName(0, 0)

    def check_commits(self, num_commits: int) -> None:
        """Raise ForeignDirectoryError where there are more commits than the log's `num_commits`."""
        upto = self.compacted().last
        beyond = (
            self.commit_path(upto, 1) if upto > num_commits else self.commit_path(num_commits + 1)
        )
        if upto > num_commits or ask(self.fs, lambda: self.fs.exists(beyond)):
            raise ForeignDirectoryError(
                f"{beyond} is there, and the control log knows"
                f" {pluralize(num_commits, 'commit')} of the run",
                "the log that wrote this directory",
                "use another root: what is stored here is read without a service",
            )

    def written(self) -> bool:
        """Returns whether a store has ever made something durable here: a commit or a part."""
        return any(
            not name.startswith(TEMP_MARK) and name != EMPTY
            for folder in (COMMITS, *TABLES)
            for name in self.names(folder)
        )

    def sweep(self, parts: Collection[str], num_commits: int = 0) -> list[str]:
        """Remove what a dead writer left, and nothing else; the files that went.

        That is: temporary files, and parts whose name is neither in `parts` nor in a commit on
        disk, replaced ones included. No part is removed while one of the first `num_commits` is
        missing: the parts that it named may be all that is left of it.

        Raises SchemaError for a commit that it cannot read.
        """
        files = [
            (folder, name) for folder in (COMMITS, PARTIAL, *TABLES) for name in self.names(folder)
        ]
        stale = [f"{folder}/{name}" for folder, name in files if name.startswith(TEMP_MARK)]
        orphans = [
            f"{folder}/{name}"
            for folder, name in files
            if folder in TABLES and name.startswith("part-")
            if name.removesuffix(".parquet") not in parts
        ]
        if orphans and self.whole(num_commits):
            named = self.ever_named()
            stale += [path for path in orphans if path not in named]
        for path in stale:
            remove(self.fs, self.path(path))
        return stale

    def whole(self, num_commits: int) -> bool:
        """Returns whether each of the first commits is here, by itself or in a range."""
        names = self.commit_names()
        upto = max((name.last for name in names if name.first), default=0)
        singles = {name.last for name in names if not name.first}
        return all(seq in singles for seq in range(upto + 1, num_commits + 1))

    def ever_named(self) -> set[str]:
        """Files that a commit or a range names, those included that a range has replaced."""
        named: set[str] = set()
        for name in self.commit_names():
            # A compaction's clearing up may be at work: what goes meanwhile needs no keeping.
            with suppress(FileNotFoundError):
                named |= {file.path for c in self.read_commits([name]) for file in c.files}
        return named

    def replaced_files(self) -> set[str]:
        """Files that only replaced commits name: still there for readers of before."""
        return self.ever_named() - {file.path for commit in self.commits() for file in commit.files}

    @contextmanager
    def locked(self, folder: str, *, wait: bool) -> Iterator[None]:
        """Locks the folder against other processes of this host, by `flock`. In an object store
        conditional puts decide who comes first. Raises BlockingIOError when somebody has it and we
        shall not `wait`.
        """
        if not self.local:
            yield
            return
        handle = locks.take(self.path(folder), locks.FOLDER, wait=wait)
        try:
            yield
        finally:
            os.close(handle)

    def names(self, folder: str) -> Iterator[str]:
        """Yields the names in a folder; none when there is no such folder."""
        if self.local:
            with suppress(FileNotFoundError):
                yield from os.listdir(self.path(folder))
            return
        self.fs.invalidate_cache()
        if self.has(folder):
            paths = ask(self.fs, lambda: self.fs.ls(self.path(folder), detail=False))
            yield from (str(path).rsplit("/", 1)[-1] for path in paths)
