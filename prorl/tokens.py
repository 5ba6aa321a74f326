"""Bearer tokens that may do less than the root's own: one role, one run, until a date.

    token = Keys(root_token).issue("trainer", run="exp1", expires_at=...)
    Keys(root_token, revoked=root / "revoked").check(f"Bearer {token}")  # -> TokenGrant

A token carries what it grants and a signature by the root's own token, so every process of a
service can check it without asking. What is taken back before its end stands in one file, an id a
line, which is read again when it changes. The root's own token grants everything; whoever changes
it takes back all others.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from prorl.access import may_be_granted
from prorl.config import ServiceConfig
from prorl.errors import ForbiddenError, UnauthorizedError

PREFIX = "prorl-"
"""What such a token begins with; the root's own is URL-safe random text."""

REVOKED, ISSUED = "revoked", "tokens.jsonl"
"""Files of a root: ids that were taken back, and what was granted (never the tokens)."""

MAX_TOKEN = 2000
"""Characters; a longer one is not looked at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenGrant:
    """What a token allows."""

    token_id: str
    role: str
    run: str = ""
    """Empty = any run."""
    expires_at: float = 0.0
    """Seconds since the epoch; 0 = never."""

    def check_run(self, run: str) -> None:
        """Raise ForbiddenError unless what is asked for belongs to this run."""
        if self.run and run != self.run:
            raise ForbiddenError(
                f"token {self.token_id} is for run {self.run!r}, not for {run!r}"
                if run
                else f"token {self.token_id} is for run {self.run!r} alone",
                "a request for that run",
                "`prorl token new` without --run makes one for all",
            )


EVERYTHING = TokenGrant(token_id="", role="")
"""What the root's own token allows."""


class Keys:
    """Makes and checks the tokens of one root."""

    def __init__(
        self, secret: str, revoked: Path | None = None, wall: Callable[[], float] = time.time
    ) -> None:
        """`secret`: the root's own token; empty lets everybody in. `revoked`: file of ids."""
        self._secret, self._revoked, self._wall = secret.encode(), revoked, wall
        self._ids: frozenset[str] = frozenset()
        self._seen: tuple[int, int] = (0, 0)
        """Change time and size of the file that `_ids` are from."""

    def issue(self, role: str, *, run: str = "", expires_at: float = 0.0) -> tuple[TokenGrant, str]:
        """A new token and what it grants. Raises UserError for a role that nobody is given."""
        may_be_granted(role)
        grant = TokenGrant(token_id=os.urandom(6).hex(), role=role, run=run, expires_at=expires_at)
        body = _text(json.dumps(asdict(grant), separators=(",", ":")).encode())
        return grant, f"{PREFIX}{body}.{self._sign(body)}"

    def check(self, header: bytes) -> TokenGrant:
        """What the `Authorization` header allows. Raises UnauthorizedError."""
        if not self._secret:
            return EVERYTHING
        scheme, _, given = header.partition(b" ")
        given = given.strip()
        if scheme.lower() != b"bearer":
            raise UnauthorizedError("no bearer token")
        if hmac.compare_digest(given, self._secret):
            return EVERYTHING
        body, _, signature = given.decode("latin-1").removeprefix(PREFIX).partition(".")
        is_ours = len(given) <= MAX_TOKEN and given.startswith(PREFIX.encode())
        if not is_ours or not hmac.compare_digest(
            signature.encode("latin-1"), self._sign(body).encode()
        ):
            raise UnauthorizedError("a wrong bearer token")
        return self._valid(TokenGrant(**json.loads(_bytes(body))))

    def _valid(self, grant: TokenGrant) -> TokenGrant:
        if grant.expires_at and self._wall() > grant.expires_at:
            raise UnauthorizedError(f"token {grant.token_id} ended", "one that is valid")
        if grant.token_id in self._taken_back():
            raise UnauthorizedError(f"token {grant.token_id} was revoked", "another one")
        return grant

    def _sign(self, body: str) -> str:
        return _text(hmac.digest(self._secret, body.encode("latin-1"), hashlib.sha256))

    def _taken_back(self) -> frozenset[str]:
        if self._revoked is None:
            return self._ids
        try:
            found = self._revoked.stat()
            if (found.st_mtime_ns, found.st_size) != self._seen:
                self._ids = frozenset(self._revoked.read_text().split())
                self._seen = found.st_mtime_ns, found.st_size
        except FileNotFoundError:
            pass  # who takes the file away gives nobody a token back
        except (OSError, UnicodeDecodeError) as error:
            raise UnauthorizedError(
                f"the file of revoked tokens cannot be read: {error}",
                "a text file with an id a line",
                f"mend {self._revoked}, or use the root's own token",
            ) from None
        return self._ids


def keys_of(config: ServiceConfig) -> Keys:
    """Those of a service's root."""
    return Keys(config.token, config.root / REVOKED)


def _text(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _bytes(text: str) -> bytes:
    try:
        return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
    except (binascii.Error, ValueError):
        raise UnauthorizedError("a wrong bearer token") from None
