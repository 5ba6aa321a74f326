"""What an endpoint answers to a ticket: groups, and where a client of this host may map them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import orjson

from prorl.errors import UserError
from prorl.flight.ticket import json_object

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadPlan:
    """What a ticket is answered with: which groups, and where they lie on the server's host."""

    cursor: str
    """After these groups; equal to the ticket's when there are none."""
    num_groups: int
    end: bool
    """Nothing will ever come after `cursor`: the run is finished, or the replay is at its end."""
    stuck: str = ""
    """Why there are no groups, if the run does not move."""
    boot_id: str = ""
    path: str = ""
    inode: tuple[int, int] = (0, 0)
    """Device and inode of the file."""
    batches: tuple[tuple[int, int], ...] = ()

    def dumps(self) -> bytes:
        """The bytes of a Flight ticket, command or FlightInfo.app_metadata."""
        return orjson.dumps(self)

    @classmethod
    def parse(cls, data: bytes) -> ReadPlan:
        """Read FlightInfo.app_metadata; keys of a later version are ignored.

        Raises UserError when it is no plan.
        """
        given = json_object(data, "plan")
        values = {name: given[name] for name in cls.__dataclass_fields__ if name in given}
        if not {"cursor", "num_groups", "end"} <= set(values):
            raise UserError(
                "the endpoint's answer is no plan",
                "cursor, num_groups and end",
                "is this a prorl store or replay?",
            )
        return cls(
            **{
                **values,
                "batches": tuple((int(o), int(n)) for o, n in values.get("batches", ())),
                "inode": tuple(map(int, values.get("inode", (0, 0)))),
            }
        )


def inode(path: str) -> tuple[int, int]:
    """Device and inode of a file; zeros where there is none."""
    try:
        status = os.stat(path)
    except OSError:
        return 0, 0
    return status.st_dev, status.st_ino


def boot_id() -> str:
    """Id of this kernel's boot, equal for all processes of one host.

    Empty where the system has none.
    """
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return ""
