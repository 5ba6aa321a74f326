"""Bearer tokens: the owner's own, and signed ones (JWT) that may do less.

    keys = Keys(owner_token, signing_key(root))
    grant, token = keys.issue("trainer", runs=("exp1",))
    keys.check(f"Bearer {token}".encode())                      # -> grant

The owner's token, ROOT/token, is random text that opens everything and never leaves the service's
host. A signed token carries what it grants: a role and the runs that it is for; every process of a
service can check it without asking. The key that signs, ROOT/signing.key, is in no other file and
crosses no connection. A token counts until that file is removed and the service started anew, which
takes back all tokens at once.
"""

from __future__ import annotations

import hmac
import os
import secrets
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from prorl.config import ServiceConfig
from prorl.errors import ForbiddenError, UnauthorizedError, UserError
from prorl.linux.files import write_private
from prorl.net.access import GRANTED

SIGNING_KEY = "signing.key"

MAX_TOKEN = 8000
"""Characters; a longer one is not looked at."""

ALGORITHM = "HS256"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenGrant:
    token_id: str
    role: str
    runs: tuple[str, ...] = ()

    def check_run(self, run: str) -> None:
        """Raise ForbiddenError unless what is asked for belongs to one of its runs."""
        if self.runs and run not in self.runs:
            raise ForbiddenError(
                f"token {self.token_id} is for {named(self.runs)}, not for {run!r}"
                if run
                else f"token {self.token_id} is for {named(self.runs)} alone",
                "a request for a run that it names",
                "`prorl token new` without --run makes one for all",
            )

    @classmethod
    def of(cls, claims: dict[str, Any]) -> TokenGrant:
        """The grant in a token's claims. Raises KeyError, TypeError."""
        return cls(**{**claims, "runs": tuple(claims["runs"])})


EVERYTHING = TokenGrant(token_id="", role="")
"""The grant of the owner's token."""


class Keys:
    def __init__(self, owner: str, signing_key: str = "") -> None:
        """`owner`: the owner's token; empty lets everybody in. `signing_key`: empty = no signed
        token is made or believed.
        """
        self._owner, self._key = owner.encode(), signing_key

    def issue(
        self,
        role: str,
        *,
        runs: Iterable[str] = (),
    ) -> tuple[TokenGrant, str]:
        """A new token and what it grants. Raises UserError for a role that nobody is given."""
        import jwt  # it brings cryptography, which most processes never need

        if role not in GRANTED:
            raise UserError(f"role {role!r}", f"one of {', '.join(GRANTED)}")
        assert self._key, "only where the signing key is"
        grant = TokenGrant(
            token_id=os.urandom(6).hex(),
            role=role,
            runs=tuple(runs),
        )
        return grant, jwt.encode({"grant": asdict(grant)}, self._key, ALGORITHM)

    def check(self, header: bytes) -> TokenGrant:
        """Returns what the `Authorization` header allows. Raises UnauthorizedError."""
        if not self._owner:
            return EVERYTHING
        scheme, _, token = header.partition(b" ")
        token = token.strip()
        if scheme.lower() != b"bearer":
            raise UnauthorizedError("no bearer token", "the header `Authorization: Bearer TOKEN`")
        if hmac.compare_digest(token, self._owner):
            return EVERYTHING
        wrong = UnauthorizedError("a wrong bearer token", "that of a join file, or of ROOT/token")
        if not self._key or len(token) > MAX_TOKEN:
            raise wrong
        import jwt

        try:
            claims = jwt.decode(token, self._key, [ALGORITHM], {"require": ["grant"]})
            return TokenGrant.of(claims["grant"])
        except (jwt.InvalidTokenError, KeyError, TypeError):
            raise wrong from None


def keys_of(config: ServiceConfig) -> Keys:
    """Returns what a process accepts: a service every token of its root, a node its own."""
    key = config.root / SIGNING_KEY
    signing = key.read_text().strip() if key.exists() else ""
    return Keys(config.token, signing)


def signing_key(root: Path) -> str:
    """The key of a root, made once, for its owner only."""
    path = root / SIGNING_KEY
    try:
        return path.read_text().strip()
    except FileNotFoundError:
        key = secrets.token_hex(32)
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_private(path, key + "\n")
        return key


def named(runs: tuple[str, ...]) -> str:
    return f"run{'s' * (len(runs) > 1)} {', '.join(map(repr, runs))}"
