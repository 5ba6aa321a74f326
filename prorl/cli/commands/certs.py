"""`prorl certs`: the certificates that others join a service with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from prorl.cli.options import JsonList, ServiceRoot
from prorl.cli.output import say_json, table
from prorl.cli.runs import DEFAULT_ROOT
from prorl.errors import ConfigError, UserError
from prorl.tls import LEAF_DAYS, ROLES, Join, renew

JOINING = ROLES[1:]


def certs(
    action: Literal["ls", "renew"] = "ls",
    *roles: str,
    days: float = LEAF_DAYS,
    root: ServiceRoot = DEFAULT_ROOT,
    json: JsonList = False,
) -> int:
    """The join files of a root: how long each is valid; make some or all of them anew.

    A running service takes the new ones at once, the old ones stay valid until their end; its own
    certificate is new at each start.

    Example: prorl certs renew trainer --days 30

    Parameters
    ----------
    action
        `ls` or `renew`.
    roles
        `node`, `trainer`, `operator`, `viewer`; default all.
    days
        How long the new ones are valid.
    """
    _check(roles, days, root)
    chosen = roles or JOINING
    if action == "renew":
        for role in chosen:
            renew(root, role, days)
    rows = [_row(root, role) for role in chosen]
    if json:
        names = ("role", "file", "url", "days_left")
        say_json([dict(zip(names, row, strict=True)) for row in rows])
        return 0
    table(("role", "file", "for", "valid"), [(*row[:3], _words(row[3])) for row in rows])
    return 0


def _check(roles: Sequence[str], days: float, root: Path) -> None:
    if unknown := [role for role in roles if role not in JOINING]:
        raise UserError(f"role {unknown[0]!r}", f"one of {', '.join(JOINING)}")
    if not 0 < days <= 3650:
        raise UserError(f"--days {days}", "more than 0 and at most 3650")
    if not (root / "join").is_dir():
        raise ConfigError(
            f"{root} has no join files",
            "the root of a service that others may reach",
            "start it with `prorl serve --listen HOST:PORT`",
        )


def _row(root: Path, role: str) -> tuple[str, str, str, float]:
    path = root / "join" / f"{role}.json"
    join = Join.parse(path)
    return role, str(path), join.url, round(join.credentials.days_left(), 1)


def _words(days: float) -> str:
    return f"{days:.0f} days" if days >= 0 else f"ended {-days:.0f} days ago"
