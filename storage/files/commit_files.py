"""Commits as files: what one says, how it is called, and which of the names are current.

commits/0000000007.json                  one commit: the files of one part
commits/0000000001-0000000064.json       a range: stands for commits 1 to 64
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

import orjson

from prorl.control import PartFile as PartFile
from prorl.errors import SchemaError
from prorl.schema import check_version
from prorl.schema.fields import SCHEMA_VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """The files that one transaction of the control log made visible."""

    commit_seq: int
    part: str
    files: tuple[PartFile, ...]
    run_id: str
    schema_version: int = SCHEMA_VERSION
    first_seq: int = 0
    """Of a range of compacted commits: the first one that it stands for, always 1. Else 0."""
    again: int = 0
    """Of a range: how often the same commits had been compacted before."""

    @property
    def name(self) -> CommitName:
        return CommitName(self.first_seq, self.commit_seq, self.again)

    def dumps(self) -> bytes:
        """The content of `commits/<seq>.json`; equal commits give equal bytes."""
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


class CommitName(NamedTuple):
    """What a commit's file is called.

    >>> str(CommitName(0, 7)), str(CommitName(1, 7))
    ('0000000007.json', '0000000001-0000000007.json')
    >>> CommitName.parse("0000000001-0000000007.json")
    CommitName(first=1, last=7, again=0)
    """

    first: int
    """Of a range; 0 for one commit."""
    last: int
    again: int = 0
    """Of a range: see `Commit.again`."""

    def __str__(self) -> str:
        start = f"{self.first:010d}-" if self.first else ""
        end = f"-{self.again:04d}" if self.again else ""
        return f"{start}{self.last:010d}{end}.json"

    @classmethod
    def parse(cls, name: str) -> CommitName | None:
        """None when `name` is no commit's."""
        found = _COMMIT_NAME.fullmatch(name)
        return cls(int(found[1] or 0), int(found[2]), int(found[3] or 0)) if found else None


_COMMIT_NAME = re.compile(r"(?:(\d{10})-)?(\d{10})(?:-(\d{4}))?\.json")


def current_names(names: Sequence[CommitName]) -> list[CommitName]:
    """Which of the names in order are current: the longest range and what comes after it.

    The range is taken as it was compacted last.
    """
    ranges = [name for name in names if name.first]
    upto = ranges[-1].last if ranges else 0
    return [*ranges[-1:], *(name for name in names if not name.first and name.last > upto)]
