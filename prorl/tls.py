"""Who is who between hosts: a private authority, certificates that carry a role, join files.

    authority = Authority.of(root / "tls")       # made once; the key never leaves this folder
    authority.join("trainer", url=..., token=...).write(path)   # 0600: all that a trainer needs
    join = Join.read(path)                       # there

`prorl serve --listen HOST:PORT` is the only way to be reached from another host, and it always
means TLS with certificates on both sides. A certificate names a role and not an address: a server
answers to the name of its role, so that nodes whose addresses nobody knows in advance (Slurm) need
no certificate of their own. The role says what its holder may do (`prorl.access`); the bearer token
in the same file can be changed without new certificates.

Not promised: that a certificate can be taken back before its end. Removing ROOT/tls is the way to
shut everybody out: the next start makes a new authority and new join files.
"""

from __future__ import annotations

import datetime
import json
import ssl
import tempfile
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from prorl.errors import ConfigError
from prorl.linux.files import write_private

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

DOMAIN = ".prorl"
"""Servers are named ROLE.prorl, whatever their address: a node cannot pass for the service."""

ROLES = ("service", "node", "trainer", "operator", "viewer")
"""`service` is our own gateway and store; the others are who joins."""

AUTHORITY_DAYS, LEAF_DAYS, RENEW_DAYS = 3650, 365, 30

BACKDATE = datetime.timedelta(hours=1)
"""Clocks of two hosts differ; a certificate is valid from an hour before it was made."""

JOIN_HINT = "prorl.connect(JOIN_FILE), which `prorl serve --listen` wrote below ROOT/join"

SERVICE_FILE = "service.json"
"""Credentials of the service's own processes, made anew at each start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """What one end of a connection shows and what it believes. All PEM text."""

    role: str
    authority: str
    certificate: str
    key: str

    @property
    def peer_name(self) -> str:
        """Whom a holder dials: the service dials nodes, everybody else the service."""
        return server_name("node" if self.role == "service" else "service")

    def server_context(self) -> ssl.SSLContext:
        """The TLS context of a server that lets in only holders of our certificates."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.verify_mode = ssl.CERT_REQUIRED
        return self._loaded(context)

    def client_context(self) -> ssl.SSLContext:
        """The TLS context of a client that believes only our servers.

        Dial with `server_hostname=peer_name`.
        """
        return self._loaded(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))

    def _loaded(self, context: ssl.SSLContext) -> ssl.SSLContext:
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        with self.files() as (_, certificate, key):
            context.load_verify_locations(cadata=self.authority)
            context.load_cert_chain(certificate, key)
        return context

    @contextmanager
    def files(self) -> Iterator[tuple[Path, Path, Path]]:
        """Authority, certificate and key as private files for the length of the block.

        For libraries that read nothing else.
        """
        with tempfile.TemporaryDirectory(prefix="prl-tls-") as folder:
            paths = Path(folder, "ca"), Path(folder, "cert"), Path(folder, "key")
            for path, text in zip(paths, (self.authority, self.certificate, self.key), strict=True):
                write_private(path, text)
            yield paths

    def write(self, path: Path) -> None:
        """Write them for their owner only (0600)."""
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_private(path, json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> Self:
        """What `write` wrote. Raises ConfigError."""
        try:
            return cls(**json.loads(path.read_text()))
        except (OSError, ValueError, TypeError) as error:
            raise ConfigError(f"credentials {path}: {error}", "what the supervisor wrote") from None

    def days_left(self) -> float:
        """Until the certificate ends; negative when it has."""
        end = _certificate(self.certificate).not_valid_after_utc
        return (end - datetime.datetime.now(datetime.UTC)) / datetime.timedelta(days=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """All that somebody on another host needs to join a service in one role."""

    url: str
    """`https://HOST:PORT` of the gateway."""
    role: str
    token: str
    authority: str
    certificate: str
    key: str

    @property
    def credentials(self) -> Credentials:
        """The credentials of connections to the service."""
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
        if (left := join.credentials.days_left()) < 0:
            raise ConfigError(
                f"the certificate in {path} ended {-left:.0f} days ago",
                "one that is valid",
                "renew it where the service is (`prorl certs renew`), and copy it once more",
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


class Authority:
    """The private authority of one root. Its key signs every certificate of the service."""

    def __init__(self, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
        self._certificate, self._key = certificate, key

    @property
    def certificate(self) -> str:
        """PEM text: what every end believes."""
        return _pem(self._certificate)

    @classmethod
    def of(cls, folder: Path) -> Self:
        """The one in `folder`, made when there is none. Raises ConfigError."""
        from cryptography.hazmat.primitives.serialization import load_pem_private_key

        path = folder / "authority.pem"
        if not path.exists():
            cls._make(path)
        text = path.read_bytes()
        try:
            key = load_pem_private_key(text, None)
        except ValueError as error:
            raise ConfigError(
                f"{path}: {error}", "a key and its certificate", "remove it: a new one is made"
            ) from None
        return cls(_certificate(text.decode()), key)  # type: ignore[arg-type]

    @classmethod
    def _make(cls, path: Path) -> None:
        try:
            from cryptography.hazmat.primitives.asymmetric import ec
        except ImportError:
            raise ConfigError(
                "the package cryptography is not installed",
                "it, for connections between hosts",
                "pip install 'prorl[tls]'",
            ) from None
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = _sign("prorl", key.public_key(), None, key, AUTHORITY_DAYS)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_private(path, _pem(key) + _pem(certificate))

    def credentials(self, role: str, days: float = LEAF_DAYS) -> Credentials:
        """A fresh key and certificate for a role."""
        from cryptography.hazmat.primitives.asymmetric import ec

        assert role in ROLES
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = _sign(role, key.public_key(), self._certificate, self._key, days)
        return Credentials(
            role=role,
            authority=self.certificate,
            certificate=_pem(certificate),
            key=_pem(key),
        )

    def join(self, role: str, *, url: str, token: str, days: float = LEAF_DAYS) -> Join:
        """The content of a join file."""
        return Join(url=url, token=token, **asdict(self.credentials(role, days)))


def server_name(role: str) -> str:
    """What the certificate of a server in this role is for."""
    return role + DOMAIN


def role_of(identity: str) -> str:
    """The role of a peer, from what its certificate says first: a server's name, else a role."""
    return identity.removesuffix(DOMAIN)


def prepare(root: Path, url: str, token: str) -> None:
    """Make what a service needs to be reached from other hosts.

    Credentials of its own below ROOT/tls, and below ROOT/join a file for each role that others may
    join in.

    A join file whose certificate still has a month, with this address and token, stays as it is.
    """
    authority = Authority.of(root / "tls")
    authority.credentials("service").write(root / "tls" / SERVICE_FILE)
    for role in ROLES[1:]:
        path = root / "join" / f"{role}.json"
        if not _still_good(path, authority, url, token):
            authority.join(role, url=url, token=token).write(path)


def renew(root: Path, role: str, days: float = LEAF_DAYS) -> Join:
    """Write a join file of ROOT anew, with a fresh key and certificate of the same authority.

    Those that were given out stay valid until their end. Raises ConfigError.
    """
    path = root / "join" / f"{role}.json"
    old = Join.parse(path)
    join = Authority.of(root / "tls").join(role, url=old.url, token=old.token, days=days)
    join.write(path)
    return join


def _still_good(path: Path, authority: Authority, url: str, token: str) -> bool:
    try:
        join = Join.read(path)
    except ConfigError:
        return False
    same = (join.url, join.token, join.authority) == (url, token, authority.certificate)
    return same and join.credentials.days_left() > RENEW_DAYS


def _certificate(pem: str) -> x509.Certificate:
    from cryptography import x509

    try:
        return x509.load_pem_x509_certificate(pem[pem.index("-----BEGIN CERT") :].encode())
    except ValueError:
        raise ConfigError("a certificate that cannot be read", "PEM text") from None


def _sign(
    name: str,
    public: ec.EllipticCurvePublicKey,
    issuer: x509.Certificate | None,
    key: ec.EllipticCurvePrivateKey,
    days: float,
) -> x509.Certificate:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.x509.oid import NameOID

    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    end = now + datetime.timedelta(days=days)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer.subject if issuer else subject)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(min(now, end) - BACKDATE)
        .not_valid_after(end)
        .add_extension(x509.BasicConstraints(ca=issuer is None, path_length=None), critical=True)
    )
    if issuer is not None:
        builder = _with_usages(builder, name)
    return builder.sign(key, hashes.SHA256())


def _with_usages(builder: x509.CertificateBuilder, name: str) -> x509.CertificateBuilder:
    """Everybody may show it as a client; the service and nodes as a server of their name, too."""
    from cryptography import x509
    from cryptography.x509.oid import ExtendedKeyUsageOID

    usages = [ExtendedKeyUsageOID.CLIENT_AUTH]
    if name in ("service", "node"):
        usages.append(ExtendedKeyUsageOID.SERVER_AUTH)
        names = x509.SubjectAlternativeName([x509.DNSName(server_name(name))])
        builder = builder.add_extension(names, critical=False)
    return builder.add_extension(x509.ExtendedKeyUsage(usages), critical=False)


def _pem(thing: x509.Certificate | ec.EllipticCurvePrivateKey) -> str:
    from cryptography import x509
    from cryptography.hazmat.primitives.serialization import (
        Encoding,
        NoEncryption,
        PrivateFormat,
    )

    if isinstance(thing, x509.Certificate):
        return thing.public_bytes(Encoding.PEM).decode()
    return thing.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()
