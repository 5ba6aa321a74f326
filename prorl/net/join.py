"""Join files: all that somebody on another host needs to take part in one role.

    prepare(root, url, keys)                     # at each start, and from time to time after that
    join = Join.read(path)                       # there
    write_join(root, "trainer", keys.issue(...)[1]).write(path)

A join file holds the service's address, a certificate of its role and a token of its role: both
bound what its holder may do, the first from other hosts, the second from the service's own, too.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

from prorl.errors import ConfigError, UnauthorizedError
from prorl.linux.files import write_private
from prorl.net.bearer import Keys
from prorl.net.tls import LEAF_DAYS, ROLES, Authority, Credentials

JOIN_HINT = "prorl.connect(JOIN_FILE), which `prorl serve --listen` wrote below ROOT/join"

SERVICE_FILE = "service.json"
"""Credentials of the processes of a service or of a node, below ROOT/tls."""

AUTHORITY_FILE = "trust.pem"
"""Below ROOT/tls: what clients believe that have a token alone (SSL_CERT_FILE)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    url: str
    """`https://HOST:PORT` of the gateway."""
    role: str
    token: str
    authority: str
    certificate: str
    key: str

    @property
    def credentials(self) -> Credentials:
        return Credentials(
            role=self.role, authority=self.authority, certificate=self.certificate, key=self.key
        )

    def write(self, path: Path) -> None:
        """Write it for its owner only (0600), atomically."""
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_private(path, json.dumps(asdict(self), indent=1))

    @classmethod
    def read(cls, path: Path) -> Self:
        """Raises ConfigError that says what is wrong with the file, or that its time is over."""
        join = cls.parse(path)
        if (remaining := join.credentials.remaining_days()) < 0:
            raise ConfigError(
                f"the certificate in {path} ended {-remaining:.0f} days ago",
                "one that is valid",
                "the service writes ROOT/join anew in time: copy it from there once more",
            )
        return join

    @classmethod
    def parse(cls, path: Path) -> Self:
        """The same whether its certificate is still valid or not."""
        expected = "a file that `prorl serve --listen` wrote below ROOT/join"
        try:
            values = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise ConfigError(f"join file {path}: {error}", expected) from None
        if not isinstance(values, dict) or set(values) != set(cls.__dataclass_fields__):
            raise ConfigError(f"join file {path} has other fields", expected)
        if not all(isinstance(value, str) and value for value in values.values()):
            raise ConfigError(f"join file {path} has empty fields", expected)
        return cls(**values)


def prepare(root: Path, url: str, keys: Keys, own_days: float = LEAF_DAYS) -> Credentials:
    """Make what a service needs to be reached from other hosts, as far as it is not there.
    Credentials of its own below ROOT/tls, which it returns, and below ROOT/join a file for each
    role that others may join in. What does not end soon and says the same stays as it is.
    """
    authority, own = Authority.of(root / "tls"), root / "tls" / SERVICE_FILE
    address = urlsplit(url).hostname or ""
    if not _lasts(own, authority, address):
        authority.credentials("service", own_days, address=address).write(own)
    for role in ROLES[1:]:
        path = root / "join" / f"{role}.json"
        if not _still_good(path, authority, url, keys):
            _, token = keys.issue(role)
            new_join(root, role, url, token).write(path)
    write_private(root / "tls" / AUTHORITY_FILE, authority.certificate)
    return Credentials.read(own)


def new_join(
    root: Path, role: str, url: str, token: str, days: float = LEAF_DAYS, node: str = ""
) -> Join:
    """The content of a join file; `node`: for this one alone. Raises ConfigError."""
    credentials = Authority.of(root / "tls").credentials(role, days, node)
    return Join(url=url, token=token, **asdict(credentials))


def url_of(root: Path) -> str:
    """The address in a root's join files. Raises ConfigError for a service without any."""
    path = root / "join" / "node.json"
    if not path.exists():
        raise ConfigError(
            f"{root} has no join files",
            "the root of a service that others may reach",
            "start it with `prorl serve --listen HOST:PORT`",
        )
    return Join.parse(path).url


def ends_soon(root: Path) -> dict[str, float]:
    """Certificates of a root that end soon: file -> days left."""
    days: dict[str, float] = {}
    for path in (root / "tls" / SERVICE_FILE, *sorted((root / "join").glob("*.json"))):
        with suppress(ConfigError):  # none of ours, or not there: whoever uses it says so
            if (credentials := Credentials.read(path)).ends_soon:
                days[str(path)] = credentials.remaining_days()
    return days


def _lasts(path: Path, authority: Authority, address: str) -> bool:
    try:
        credentials = Credentials.read(path)
    except ConfigError:
        return False
    same = credentials.authority == authority.certificate and credentials.is_for(address)
    return same and not credentials.ends_soon


def _still_good(path: Path, authority: Authority, url: str, keys: Keys) -> bool:
    try:
        join = Join.read(path)
        allowed = keys.check(f"Bearer {join.token}".encode())
    except (ConfigError, UnauthorizedError):
        return False
    same = (join.url, allowed.role, join.authority) == (url, join.role, authority.certificate)
    return same and not join.credentials.ends_soon
