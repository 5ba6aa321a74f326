"""`prorl token`: bearer tokens for people and programs that may do less than the root's owner."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Literal

from prorl.cli.options import JsonOut, ServiceRoot
from prorl.cli.output import say, say_json, table
from prorl.cli.runs import DEFAULT_ROOT
from prorl.errors import ConfigError, UserError
from prorl.linux.files import write_private
from prorl.tokens import ISSUED, REVOKED, Keys, TokenGrant

Action = Literal["new", "ls", "revoke"]

DAY_S = 86400.0


def token(
    action: Action = "ls",
    token_id: str = "",
    *,
    role: str = "trainer",
    run: str = "",
    days: float = 0.0,
    root: ServiceRoot = DEFAULT_ROOT,
    json: JsonOut = False,
) -> int:
    """Tokens of a root: make one for a role, for one run, until a date; list them; take one back.

    A running service takes both at once.

    Example: prorl token new --role trainer --run exp1 --days 7

    Example: prorl token revoke 4f1a5be0c2d9

    Parameters
    ----------
    action
        `new`, `ls`, `revoke`.
    token_id
        Of the token to be revoked.
    role
        `trainer`, `operator` or `viewer`: what each may do stands in `docs/operating.md`.
    run
        The one run that it is for; default all.
    days
        How long it counts; 0 = until it is revoked.
    """
    if (action == "revoke") != bool(token_id):
        raise UserError(f"prorl token {action} {token_id}", "an id for `revoke` alone")
    issued = _issued(root)
    if action == "revoke":
        _revoke(root, token_id, issued)
    if action == "new":
        return _new(root, issued, Keys(_secret(root)), role, run, days, json)
    revoked = _revoked(root)
    if json:
        say_json([asdict(one) | {"state": _state(one, revoked)} for one in issued])
        return 0
    rows = [(one.token_id, one.role, one.run or "all", _state(one, revoked)) for one in issued]
    table(("token", "role", "run", "state"), rows)
    return 0


def _new(
    root: Path,
    issued: list[TokenGrant],
    keys: Keys,
    role: str,
    run: str,
    days: float,
    as_json: bool,
) -> int:
    if not 0 <= days <= 36500:
        raise UserError(f"--days {days}", "a number of days, or 0")
    grant, text = keys.issue(role, run=run, expires_at=time.time() + days * DAY_S if days else 0)
    write_private(
        root / ISSUED, "".join(json.dumps(asdict(one)) + "\n" for one in [*issued, grant])
    )
    if as_json:
        say_json(asdict(grant) | {"token": text})
    else:
        say(text)
    return 0


def _revoke(root: Path, token_id: str, issued: list[TokenGrant]) -> None:
    if token_id not in {one.token_id for one in issued}:
        raise UserError(f"token {token_id!r}", "an id that `prorl token ls` shows")
    write_private(root / REVOKED, "\n".join(sorted({*_revoked(root), token_id})) + "\n")


def _state(grant: TokenGrant, revoked: set[str]) -> str:
    if grant.token_id in revoked:
        return "revoked"
    if not grant.expires_at:
        return "valid"
    end = time.strftime("%Y-%m-%d %H:%M", time.localtime(grant.expires_at))
    return f"until {end}" if grant.expires_at > time.time() else f"ended {end}"


def _secret(root: Path) -> str:
    try:
        return (root / "token").read_text().strip()
    except OSError as error:
        raise ConfigError(
            f"{root}/token: {error.strerror}",
            "the root of a service",
            "start one with `prorl serve`",
        ) from None


def _issued(root: Path) -> list[TokenGrant]:
    path = root / ISSUED
    lines = path.read_text().splitlines() if path.exists() else []
    try:
        return [TokenGrant(**json.loads(line)) for line in lines]
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"{path}: {error}",
            "what `prorl token new` wrote",
            "mend or remove it: tokens stay valid",
        ) from None


def _revoked(root: Path) -> set[str]:
    path = root / REVOKED
    return set(path.read_text().split()) if path.exists() else set()
