"""`prorl token`: bearer tokens and join files of people and programs that may do less than all."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Literal

from prorl.cli.options import JsonOut, ServiceRoot
from prorl.cli.output import say, say_json, table
from prorl.cli.runs import DEFAULT_ROOT
from prorl.errors import ConfigError, UserError
from prorl.net.bearer import Keys, signing_key
from prorl.net.join import Join, new_join, url_of
from prorl.net.tls import ROLES
from prorl.pluralize import pluralize

Action = Literal["new", "ls"]
JOINING = ROLES[1:]


def token(
    action: Action = "ls",
    /,
    *,
    role: str = "trainer",
    run: list[str] | None = None,
    join: Path | None = None,
    node: str = "",
    root: ServiceRoot = DEFAULT_ROOT,
    json: JsonOut = False,
) -> int:
    """Make tokens and join files for a root: each has a role, for all runs or some.

    A running service accepts a new token at once. The join files of a service with
    --listen (ROOT/join) hold certificates, which last a year; the service renews them a month
    before they expire.

    Example: prorl token new --role trainer --run exp1

    Example: prorl token new --role viewer --join viewer.json

    Parameters
    ----------
    action
        `new` makes a token, `ls` lists the join files.
    role
        `trainer`, `viewer`, `node`, `guest`: `docs/operating.md` says what each may do.
    run
        A run that the token is for; may be repeated. Default: all runs. A guest's token is for
        exactly one.
    join
        Write a join file for another host, with the token and a certificate of its role, instead
        of printing the token.
    node
        For `--role node --join`: the one node that the token is for.
    """
    if action == "new":
        if role == "guest" and len(run or ()) != 1:
            problem = (
                f"a guest's token for {pluralize(len(run), 'run')}"
                if run
                else "a guest's token for all runs"
            )
            raise UserError(problem, "one run", "add `--run RUN`")
        grant, text = Keys(_owner(root), signing_key(root)).issue(role, runs=run or ())
        if join is not None:
            if role not in JOINING:
                raise UserError(f"--join for role {role!r}", f"one of {', '.join(JOINING)}")
            new_join(root, role, url_of(root), text, node=node).write(join)
        if json:
            say_json(asdict(grant) | ({"file": str(join)} if join else {"token": text}))
        else:
            say(str(join or text))
        return 0
    joins = [row for role in JOINING if (row := _join_row(root, role))]
    if json:
        fields = ("role", "file", "url", "days_left")
        say_json({"join_files": [dict(zip(fields, row, strict=True)) for row in joins]})
        return 0
    table(("role", "join file", "for", "valid"), [(*row[:3], _words(row[3])) for row in joins])
    return 0


def _join_row(root: Path, role: str) -> tuple[str, str, str, float] | None:
    """Role, file, the service that it is for, days for which it is valid."""
    path = root / "join" / f"{role}.json"
    if not path.exists():
        return None
    join = Join.parse(path)
    return role, str(path), join.url, round(join.credentials.remaining_days(), 1)


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
