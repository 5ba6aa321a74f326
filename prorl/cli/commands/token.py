"""`prorl token`: bearer tokens and join files of people and programs that may do less than all."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Literal

from prorl.cli.options import JsonOut, ServiceRoot
from prorl.cli.output import say, say_json, table
from prorl.cli.runs import DEFAULT_ROOT
from prorl.errors import ConfigError, UserError
from prorl.net.bearer import Keys, signing_key
from prorl.net.join import Join, new_join, renew, url_of
from prorl.net.tls import LEAF_DAYS, ROLES

Action = Literal["new", "ls", "renew"]
JOINING = ROLES[1:]

DAY_S = 86400.0
TOKEN_DAYS = 90.0
"""What nobody can take back alone must end."""


def token(
    action: Action = "ls",
    *names: str,
    role: str = "trainer",
    run: list[str] | None = None,
    days: float | None = None,
    join: Path | None = None,
    node: str = "",
    root: ServiceRoot = DEFAULT_ROOT,
    json: JsonOut = False,
) -> int:
    """Tokens and join files of a root: for a role and some runs, until a date; renewed.

    A running service takes all of it at once. Join files (ROOT/join, of a service with --listen)
    hold certificates; old ones stay valid until their end. The service renews its own certificate
    and the files in ROOT/join a month before they end.

    Example: prorl token new --role trainer --run exp1 --days 7

    Example: prorl token new --role trainer --join lab.json --days 30

    Example: prorl token renew trainer --days 30

    Parameters
    ----------
    action
        `new`, `ls` the join files, `renew` those of these roles (default all).
    names
        Roles: node, trainer, operator, viewer.
    role
        `trainer`, `operator`, `viewer`, `node`, `guest`: what each may do stands in
        `docs/operating.md`.
    run
        A run that it is for, may be repeated; default all.
    days
        How long it counts. Default: a token 90, a join file 365.
    join
        Write a join file with the token for another host, whose certificate is of its role and
        ends with it, instead of printing the token.
    node
        For `--role node --join`: the one node that it is for.
    """
    if action != "renew" and names:
        given = " ".join(("prorl token", action, *names))
        raise UserError(given, "roles for `renew`, nothing for the others")
    if days is not None and not 0 < days <= 3650:
        raise UserError(f"--days {days:g}", "more than 0 and at most 3650")
    if action == "new":
        keys = Keys(_owner(root), signing_key(root))
        end = time.time() + (days or (LEAF_DAYS if join else TOKEN_DAYS)) * DAY_S
        grant, text = keys.issue(role, runs=run or (), expires_at=end)
        if join is not None:
            if role not in JOINING:
                raise UserError(f"--join for role {role!r}", f"one of {', '.join(JOINING)}")
            new_join(root, role, url_of(root), text, days or LEAF_DAYS, node).write(join)
        if json:
            say_json(asdict(grant) | ({"file": str(join)} if join else {"token": text}))
        else:
            say(str(join or text))
        return 0
    if action == "renew":
        _renew(root, names or JOINING, days or LEAF_DAYS)
    joins = [row for role in JOINING if (row := _join_row(root, role))]
    if json:
        fields = ("role", "file", "url", "days_left")
        say_json({"join_files": [dict(zip(fields, row, strict=True)) for row in joins]})
        return 0
    table(("role", "join file", "for", "valid"), [(*row[:3], _words(row[3])) for row in joins])
    return 0


def _renew(root: Path, roles: Sequence[str], days: float) -> None:
    if unknown := [role for role in roles if role not in JOINING]:
        raise UserError(f"role {unknown[0]!r}", f"one of {', '.join(JOINING)}")
    url_of(root)
    for role in roles:
        renew(root, role, days)


def _join_row(root: Path, role: str) -> tuple[str, str, str, float] | None:
    """Role, file, the service that it is for, days for which it is valid."""
    path = root / "join" / f"{role}.json"
    if not path.exists():
        return None
    join = Join.parse(path)
    return role, str(path), join.url, round(join.credentials.days_left(), 1)


def _words(days: float) -> str:
    return f"{days:.0f} days" if days >= 0 else f"ended {-days:.0f} days ago"


def _owner(root: Path) -> str:
    try:
        return (root / "token").read_text().strip()
    except OSError as error:
        raise ConfigError(
            f"{root}/token: {error.strerror}",
            "the root of a service",
            "start one with `prorl serve`",
        ) from None
