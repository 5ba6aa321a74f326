"""The identities of hosts: a private authority, and certificates that carry a role.

    authority = Authority.of(root / "tls")       # made once; the key never leaves this folder
    authority.credentials("trainer")             # a key and its certificate, for a join file
    authority.sign(request, "n7")                # of a node's own key, which never leaves the node

`prorl serve --listen HOST:PORT` is the only way to be reached from another host, and it always
means TLS with certificates on both sides. A certificate names a role and not an address: a server
answers to the name of its role, so that nodes whose addresses nobody knows in advance (Slurm) need
none made for them by hand. A node's says which node it is as well (`node:n7`): it gets that one
from the service when it comes, and nobody else speaks in its name. The role says what its holder
may do (`prorl.net.access`).

Certificates are renewed before they end: the supervisor writes the service's own and the join files
anew, nodes ask for theirs; `LiveCredentials` are what a process shows at the moment.

Not promised: that a certificate can be taken back before its end. Removing ROOT/tls is the way to
shut everybody out: the next start makes a new authority and new join files.
"""

from __future__ import annotations

import datetime
import ipaddress
import json
import ssl
import tempfile
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Self

from prorl.errors import ConfigError, UnauthorizedError, UserError
from prorl.linux.files import write_private

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

DOMAIN = ".prorl"
"""Servers are named ROLE.prorl, whatever their address: a node cannot pass for the service."""

ROLES = ("service", "node", "trainer", "viewer")
"""`service` is our own gateway and store; the others are who joins."""

AUTHORITY_DAYS, LEAF_DAYS, OWN_DAYS, RENEW_DAYS = 3650, 365, 90, 30
"""Lifetimes of certificates; what has less than the last, or less than a third of its lifetime, is
made anew, and warned of where it cannot.
"""

LOOK_HOURS = 1
"""The hours between two looks whether one's certificate ends soon; fewer if its lifetime is
short.
"""

MAX_NODE_NAME = 59
"""A common name has 64 characters, and `node:` goes before it."""

DAY = datetime.timedelta(days=1)

BACKDATE = datetime.timedelta(hours=1)
"""Clocks of two hosts differ; a certificate is valid from an hour before it was made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """Holds what one end of a connection shows and what it believes. All PEM text."""

    role: str
    authority: str
    certificate: str
    key: str

    @property
    def current(self) -> Self:
        """Themselves; `LiveCredentials` have others in time."""
        return self

    @property
    def peer_name(self) -> str:
        """Returns the name that a holder dials: the service dials nodes, everybody else the
        service.
        """
        return server_name("node" if self.role == "service" else "service")

    def server_context(self) -> ssl.SSLContext:
        """The TLS context of a server that lets in only holders of our certificates."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.verify_mode = ssl.CERT_REQUIRED
        return self._loaded(context)

    def client_context(self) -> ssl.SSLContext:
        """The TLS context of a client that believes only our servers. Dial with
        `server_hostname=peer_name`.
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
        """Authority, certificate and key as private files for the length of the block. For
        libraries that read nothing else.
        """
        with tempfile.TemporaryDirectory(prefix="prl-tls-") as folder:
            paths = Path(folder, "ca"), Path(folder, "cert"), Path(folder, "key")
            for path, text in zip(paths, (self.authority, self.certificate, self.key), strict=True):
                write_private(path, text)
            yield paths

    def write(self, path: Path) -> None:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_private(path, json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> Self:
        """Reads a file that `write` wrote, or a join file. Raises ConfigError."""
        try:
            values = json.loads(path.read_text())
            return cls(**{name: values[name] for name in cls.__dataclass_fields__})
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ConfigError(f"credentials {path}: {error}", "what the supervisor wrote") from None

    def check_valid(self) -> None:
        """Raise UnauthorizedError when the certificate has ended."""
        if (remaining := self.remaining_days()) < 0:
            raise UnauthorizedError(
                f"our own certificate ended {-remaining:.1f} days ago",
                "one that is valid",
                "start with a join file that the service has written anew",
            )

    def is_for(self, address: str) -> bool:
        """Returns whether a client that dials it there believes the certificate."""
        from cryptography import x509

        names = _certificate(self.certificate).extensions.get_extension_for_class(
            x509.SubjectAlternativeName
        )
        return _general_name(address) in names.value

    def remaining_days(self) -> float:
        end = _certificate(self.certificate).not_valid_after_utc
        return (end - datetime.datetime.now(datetime.UTC)) / DAY

    @property
    def lifetime_days(self) -> float:
        certificate = _certificate(self.certificate)
        return (certificate.not_valid_after_utc - certificate.not_valid_before_utc - BACKDATE) / DAY

    @property
    def ends_soon(self) -> bool:
        """Tells whether it is time for another one."""
        return self.remaining_days() < min(RENEW_DAYS, self.lifetime_days / 3)

    @property
    def look_s(self) -> float:
        """Tells how often to look whether it is: four times within that third."""
        return max(1.0, min(LOOK_HOURS * 3600, self.lifetime_days * 86400 / 12))


class LiveCredentials:
    def __init__(self, path: Path) -> None:
        """Raises ConfigError."""
        self._path, self._changed_ns = path, 0
        self._current: Credentials

    @property
    def current(self) -> Credentials:
        try:
            changed_ns = self._path.stat().st_mtime_ns
        except OSError as error:
            raise ConfigError(f"credentials {self._path}: {error.strerror}") from None
        if changed_ns != self._changed_ns:
            self._current, self._changed_ns = Credentials.read(self._path), changed_ns
        return self._current


AnyCredentials = Credentials | LiveCredentials


class Caller(NamedTuple):
    """Holds who is at the other end of a connection from another host."""

    role: str
    node: str = ""
    """The node's name, where the role is `node`; empty: one that has no certificate of its own
    yet.
    """

    @classmethod
    def of(cls, identity: str) -> Caller:
        """Reads the name that a certificate states first: a server's name, else the subject's.

        >>> Caller.of("n7.node.prorl") == Caller.of("node:n7")
        True
        >>> Caller.of("trainer")
        Caller(role='trainer', node='')
        """
        if identity.endswith(DOMAIN):
            node, _, role = identity.removesuffix(DOMAIN).rpartition(".")
        else:
            role, _, node = identity.partition(":")
        return cls(role, node)


class Authority:
    """The private authority of one root. Its key signs every certificate of the service."""

    def __init__(self, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
        self._certificate, self._key = certificate, key

    @property
    def certificate(self) -> str:
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
                "install prorl's extra `tls`",
            ) from None
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = _sign("prorl", key.public_key(), None, key, AUTHORITY_DAYS)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_private(path, _pem(key) + _pem(certificate))

    def credentials(
        self, role: str, days: float = LEAF_DAYS, node: str = "", address: str = ""
    ) -> Credentials:
        """A fresh key and certificate for a role; `node`: for this one alone. `address`: by which a
        service is known to clients that believe our authority alone.
        """
        from cryptography.hazmat.primitives.asymmetric import ec

        assert role in ROLES
        key = ec.generate_private_key(ec.SECP256R1())
        subject = f"{role}:{node}" if node else role
        certificate = _sign(subject, key.public_key(), self._certificate, self._key, days, address)
        return Credentials(
            role=role,
            authority=self.certificate,
            certificate=_pem(certificate),
            key=_pem(key),
        )

    def sign(self, request: str, node: str, days: float = OWN_DAYS) -> str:
        """A certificate of this node for the key in `request` (PEM of a PKCS#10 request). Nothing
        else that the request says counts. Raises UserError.
        """
        from cryptography import x509
        from cryptography.hazmat.primitives.asymmetric import ec

        expected = "a PKCS#10 request in PEM text, with an elliptic key, signed by it"
        try:
            csr = x509.load_pem_x509_csr(request.encode())
            key, is_signed = csr.public_key(), csr.is_signature_valid
        except (ValueError, TypeError) as error:
            raise UserError(
                f"a certificate request that cannot be read: {error}", expected
            ) from None
        if not isinstance(key, ec.EllipticCurvePublicKey) or not is_signed:
            raise UserError("a certificate request of another kind", expected)
        return _pem(_sign(f"node:{node}", key, self._certificate, self._key, days))


class NodeKey:
    """A node's own key: it is made here and kept in a 0600 file of the node alone."""

    def __init__(self) -> None:
        from cryptography.hazmat.primitives.asymmetric import ec

        self._key = ec.generate_private_key(ec.SECP256R1())

    def request(self, node: str) -> str:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes
        from cryptography.hazmat.primitives.serialization import Encoding
        from cryptography.x509.oid import NameOID

        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"node:{node}")])
        builder = x509.CertificateSigningRequestBuilder().subject_name(subject)
        return builder.sign(self._key, hashes.SHA256()).public_bytes(Encoding.PEM).decode()

    def credentials(self, certificate: str, authority: str) -> Credentials:
        """Returns the credentials with the certificate that the authority made of the request."""
        return Credentials(
            role="node", authority=authority, certificate=certificate, key=_pem(self._key)
        )


def server_name(role: str) -> str:
    """Returns what the certificate of a server in this role is for."""
    return role + DOMAIN


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
    address: str = "",
) -> x509.Certificate:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

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
        .add_extension(_key_usage(issuer is None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key()), critical=False
        )
    )
    if issuer is not None:
        # Everybody may show it as a client; the service and nodes as a server of their name, too.
        caller, usages = Caller.of(name), [ExtendedKeyUsageOID.CLIENT_AUTH]
        if caller.role in ("service", "node"):
            usages.append(ExtendedKeyUsageOID.SERVER_AUTH)
            # gRPC tells us the first name of a caller alone: the one that says which node it is.
            own = [f"{caller.node}.{server_name(caller.role)}"] if caller.node else []
            names = [x509.DNSName(name) for name in (*own, server_name(caller.role))]
            extra_names = [_general_name(address)] if address else []
            builder = builder.add_extension(
                x509.SubjectAlternativeName([*names, *extra_names]), critical=False
            )
        builder = builder.add_extension(x509.ExtendedKeyUsage(usages), critical=False)
    return builder.sign(key, hashes.SHA256())


def _key_usage(of_authority: bool) -> x509.KeyUsage:
    """Returns what a key may sign: clients that verify strictly, as Python 3.13 does by default,
    refuse an authority whose certificate does not state it.
    """
    from cryptography import x509

    return x509.KeyUsage(
        digital_signature=not of_authority,
        key_cert_sign=of_authority,
        crl_sign=of_authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _general_name(address: str) -> x509.GeneralName:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(address.strip("[]")))
    except ValueError:
        return x509.DNSName(address)


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
