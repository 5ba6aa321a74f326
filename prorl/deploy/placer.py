"""A placer: one `prorl cluster` on a root, apart from every other one and from everybody else.

    with placer(root, settings) as made:
        async with local(made, leavers) as cluster: ...

It has a name, with which those of its nodes begin, and a folder of its own below ROOT/placers: the
nodes' settings, and a key with which its Dask scheduler and its nodes know each other. Dask runs
whatever it is sent, so nobody else may speak there: not the holder of a join file either. The
authority that signed the key is gone once it has signed, and the folder when the placer ends.
"""

from __future__ import annotations

import secrets
import shutil
import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import orjson
from distributed.security import Security

from prorl.errors import ConfigError
from prorl.linux.files import write_private
from prorl.net.tls import AUTHORITY_DAYS, Authority
from prorl.types import Json


class Placer(NamedTuple):
    """Everything that a node must be told is in `folder`."""

    name: str
    folder: Path
    join: Path
    """ROOT/join/node.json."""
    host: str = "127.0.0.1"
    """Address of this host that its nodes can dial; Dask listens on no other."""

    @property
    def settings(self) -> Path:
        return self.folder / "nodes.json"

    @property
    def arguments(self) -> list[str]:
        """The arguments of a placed node besides its scheduler and name."""
        return ["--join", str(self.join.absolute()), "--placer", str(self.folder.absolute())]


@contextmanager
def placer(root: Path, settings: Mapping[str, Json], host: str = "127.0.0.1") -> Iterator[Placer]:
    """Make one for the service of a root. Raises ConfigError when others cannot reach that."""
    join = root / "join" / "node.json"
    if not join.exists():
        raise ConfigError(
            f"{join} does not exist", "a service for other hosts", "prorl serve --listen HOST:PORT"
        )
    name = f"p{secrets.token_hex(3)}"
    new_placer = Placer(name, root / "placers" / name, join, host)
    new_placer.folder.mkdir(mode=0o700, parents=True)
    try:
        new_placer.settings.write_bytes(orjson.dumps(dict(settings)))
        credentials = Authority.of(new_placer.folder).credentials("node", AUTHORITY_DAYS)
        (new_placer.folder / "authority.pem").unlink()
        for file, text in zip(
            _files(new_placer.folder),
            (credentials.authority, credentials.certificate, credentials.key),
            strict=True,
        ):
            write_private(file, text)
        yield new_placer
    finally:
        shutil.rmtree(new_placer.folder, ignore_errors=True)


def security(folder: Path) -> Security:
    """Returns the keys and certificates of both ends of each of a placer's connections."""
    ca, certificate, key = map(str, _files(folder))
    options = {
        f"tls_{role}_{kind}": path
        for role in ("client", "scheduler", "worker")
        for kind, path in (("cert", certificate), ("key", key))
    }
    return Security(
        require_encryption=True, tls_ca_file=ca, tls_min_version=ssl.TLSVersion.TLSv1_3, **options
    )


def _files(folder: Path) -> tuple[Path, Path, Path]:
    return folder / "ca.pem", folder / "cert.pem", folder / "key.pem"
