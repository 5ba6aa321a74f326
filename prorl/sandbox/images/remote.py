"""The sources of pulled images: a container registry, an OCI layout, an archive of `docker save`, a
root file system in one archive.

Formats: OCI image and distribution specifications 1.1, Docker's registry protocol version 2.

A source says which layers an image has, and gives one at a time as a file whose digest was
checked. What a registry cut off goes on where it was (`Range`), also in a later process. No
helper of credentials is run: only what stands in the files of docker and podman counts.
"""

from __future__ import annotations

import base64
import hashlib
import ipaddress
import json
import os
import platform
import re
import socket
import tarfile
import urllib.request
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol
from urllib.parse import urlencode, urljoin

import urllib3
from urllib3.exceptions import HTTPError, LocationParseError, MaxRetryError
from urllib3.util import parse_url

from prorl.errors import ProrlError, StorageError, UserError
from prorl.sandbox.images.registry import HUB
from prorl.sandbox.images.unpack import MAX_LAYER_BYTES, plain_stream

HUB_HOST, HUB_KEY = "registry-1.docker.io", "https://index.docker.io/v1/"
_NAME = r"[a-z0-9]+(?:[._-]+[a-z0-9]+)*"
REFERENCE = re.compile(
    r"(?:(?P<host>localhost(?::\d+)?|[\w-]+(?:\.[\w.-]+|:\d+)(?::\d+)?|\[[\da-f:]+\](?::\d+)?)/)?"
    rf"(?P<path>{_NAME}(?:/{_NAME})*)(?::(?P<tag>\w[\w.-]{{0,127}}))?"
    r"(?:@(?P<digest>sha256:[0-9a-f]{64}))?"
)
DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
PORTS = {"http": 80, "https": 443}
LOOPBACK = re.compile(r"(localhost|127\.[\d.]+|\[::1\])(:\d+)?")
MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}
MANIFESTS = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)
MANIFEST_BYTES = 4 << 20
"""The limit of a manifest, a configuration or a token, as registries bound them."""
MAX_INDEXES = 4
"""An index may name an index; engines write two of them at most."""
MAX_LAYERS = 512
"""Four times what an overlay of Linux takes; each is a request and a folder."""
LIE_BYTES = 64 << 20
"""So far a blob is read beyond its manifest's size, to tell a wrong size from a broken registry."""
TRIES = 6
"""The tries of one blob that brings nothing; each byte that came begins the count anew."""
RETRIES = urllib3.Retry(
    total=TRIES, backoff_factor=0.25, status_forcelist=(429, 500, 502, 503, 504)
)
"""`Retry-After` counts for as long as it says; who pulls bounds the whole."""
TIMEOUT = urllib3.Timeout(connect=20, read=60)
MAX_REDIRECTS = 5
"""Registries send a client on once, to where their blobs are."""

Tell = Callable[[int], None]
"""Gets the number of bytes that came."""


class Layer(NamedTuple):
    """One layer of an image, lowest first."""

    digest: str
    """The digest of the blob as it lies at its source."""
    size: int
    diff_id: str
    """The digest of the unpacked archive: what a store knows it by."""


class Manifest(NamedTuple):
    """The manifest that a source gives of an image."""

    digest: str
    """The digest of its configuration: what everybody calls the image's id."""
    config: Mapping[str, Any]
    """Environment, user, working directory."""
    layers: tuple[Layer, ...]


class ImageSource(Protocol):
    def manifest(self) -> Manifest:
        """Raises UserError for what is no image for this machine, StorageError."""

    def blob(self, layer: Layer, path: Path, tell: Tell) -> None:
        """Write a layer's checked blob to a path, or go on with what is there."""


def source_of(text: str, mirrors: Mapping[str, str] | None = None) -> ImageSource:
    """The source that `--from` names. Raises UserError."""
    scheme, _, rest = text.partition(":")
    if scheme == "docker" and rest.startswith("//"):
        return Remote(rest[2:], mirrors or {})
    if scheme == "oci" and rest:
        return Layout(*_tagged(rest))
    if scheme == "docker-archive" and rest:
        return Archive(*_tagged(rest))
    if scheme == "tarball" and rest:
        return Tarball(Path(rest))
    raise UserError(
        f"image source {text!r}",
        "docker://REFERENCE, oci:FOLDER[:TAG], docker-archive:FILE[:TAG] or tarball:FILE",
    )


def _tagged(text: str) -> tuple[Path, str]:
    path, _, tag = text.partition(":")
    return Path(path), tag


def described(config: bytes, digest: str, blobs: list[tuple[str, int]]) -> Manifest:
    """A manifest from an image's configuration. Raises UserError where the two disagree."""
    try:
        parsed = json.loads(config)
        diff_ids = parsed["rootfs"]["diff_ids"]
        settings = parsed.get("config") or {}
        if not isinstance(settings, dict) or not isinstance(settings.get("Env") or [], list):
            raise ValueError("its `config` is no object, or `Env` in it no list")
        if len(blobs) > MAX_LAYERS:
            raise ValueError(f"{len(blobs)} layers, at most {MAX_LAYERS} are taken")
        if wrong := [size for _, size in blobs if type(size) is not int or size < 0]:
            raise ValueError(f"{wrong[0]!r} as the size of a layer")
        if (most := max((size for _, size in blobs), default=0)) > MAX_LAYER_BYTES:
            raise ValueError(f"a layer of {most:,} bytes, at most {MAX_LAYER_BYTES:,} are taken")
        pairs = [Layer(*blob, diff) for blob, diff in zip(blobs, diff_ids, strict=True)]
        if not pairs or not all(map(DIGEST.fullmatch, (digest, *(p.diff_id for p in pairs)))):
            raise ValueError("it has no layers, or digests that are no sha256")
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"image configuration {digest}: {error!r}", "one digest a layer") from None
    return Manifest(digest, settings, tuple(pairs))


def choose(index: Mapping[str, Any], tag: str, source: str) -> Mapping[str, Any]:
    """The manifest of an index for this machine, or the one of a tag. Raises UserError."""
    named = "org.opencontainers.image.ref.name"
    manifests = [
        m for m in index["manifests"] if not tag or m.get("annotations", {}).get(named) == tag
    ]
    ours = MACHINES.get(platform.machine(), platform.machine())
    for manifest in manifests:
        place = manifest.get("platform") or {"os": "linux", "architecture": ours}
        if (place.get("os"), place.get("architecture")) == ("linux", ours):
            return dict(manifest)
    there = [m.get("platform") or m.get("annotations") for m in index["manifests"]]
    raise UserError(f"{source}: it has {there}"[:500], f"linux/{ours} {tag}".strip())


def follow(body: bytes, tag: str, source: str, read: Callable[[str, str], bytes]) -> Manifest:
    """The image that a manifest or an index means on this machine.

    `read` gives what is at `manifests` or `blobs` under a digest, checked.
    """
    manifest, indexes = json.loads(body), 0
    while "manifests" in manifest:
        if (indexes := indexes + 1) > MAX_INDEXES:
            raise ValueError(f"more than {MAX_INDEXES} indexes, one in the other")
        manifest, tag = json.loads(read("manifests", choose(manifest, tag, source)["digest"])), ""
    blobs = [(blob["digest"], blob["size"]) for blob in manifest["layers"]]
    digest = manifest["config"]["digest"]
    if not all(DIGEST.fullmatch(name) for name, _ in (*blobs, (digest, 0))):
        raise ValueError("a digest that is none")
    return described(read("blobs", digest), digest, blobs)


class Layout:
    """A folder of the OCI image layout."""

    def __init__(self, folder: Path, tag: str) -> None:
        self._folder, self._tag = folder, tag

    def manifest(self) -> Manifest:
        source = f"oci:{self._folder}"
        try:
            index = (self._folder / "index.json").read_bytes()
            return follow(index, self._tag, source, lambda _, digest: self._read(digest))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{source}: {error!r}", "an OCI image layout") from None

    def _read(self, digest: str) -> bytes:
        data = self._path(digest).read_bytes()
        if f"sha256:{hashlib.sha256(data).hexdigest()}" != digest:
            raise ValueError(f"{digest} holds something else")
        return data

    def _path(self, digest: str) -> Path:
        if not DIGEST.fullmatch(digest):
            raise ValueError(f"{digest!r} is no digest")
        return self._folder / "blobs" / "sha256" / digest[7:]

    def blob(self, layer: Layer, path: Path, tell: Tell) -> None:
        try:
            with open(self._path(layer.digest), "rb") as file:
                _take(file, layer, path, tell)
        except (FileNotFoundError, ValueError) as error:
            raise UserError(f"oci:{self._folder}: {error}", "a layout with all its blobs") from None


class Archive:
    """An archive that `docker save` or `podman save` wrote."""

    def __init__(self, path: Path, tag: str) -> None:
        self._path, self._tag = path, tag

    def manifest(self) -> Manifest:
        return self.read()[0]

    def read(self) -> tuple[Manifest, bytes]:
        """The manifest, and the configuration as it stands in the archive. Raises UserError."""
        source = f"docker-archive:{self._path}"
        try:
            with tarfile.open(self._path) as archive:
                images = json.load(_member(archive, "manifest.json"))
                tags = [tag for image in images for tag in image.get("RepoTags") or ()]
                entries = [i for i in images if not self._tag or self._tag in (i["RepoTags"] or ())]
                if len(entries) != 1:
                    raise UserError(
                        f"{source}: {len(images)} images, {tags}", f"{source}:TAG of one"
                    )
                config = _member(archive, entries[0]["Config"]).read(MANIFEST_BYTES)
                sizes = [(name, archive.getmember(name).size) for name in entries[0]["Layers"]]
        except (OSError, ValueError, KeyError, TypeError, tarfile.TarError) as error:
            raise UserError(f"{source}: {error!r}", "what `docker save` wrote") from None
        return described(config, f"sha256:{hashlib.sha256(config).hexdigest()}", sizes), config

    def blob(self, layer: Layer, path: Path, tell: Tell) -> None:
        """Its digest is a name here; `diff_id` tells whether it is what it should be."""
        with tarfile.open(self._path) as archive:
            _take(_member(archive, layer.digest), layer, path, tell, check=False)


class Tarball:
    """One archive that is a whole root file system: an image of one layer."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def manifest(self) -> Manifest:
        """Reads all of it."""
        digest = hashlib.sha256()
        try:
            with open(self._path, "rb") as file:
                stream = plain_stream(file)
                while piece := stream.read(1 << 20):
                    digest.update(piece)
        except (OSError, EOFError) as error:
            raise UserError(f"tarball:{self._path}: {error}", "a tar archive") from None
        name = f"sha256:{digest.hexdigest()}"
        return Manifest(name, {}, (Layer(name, self._path.stat().st_size, name),))

    def blob(self, layer: Layer, path: Path, tell: Tell) -> None:
        with open(self._path, "rb") as file:
            _take(file, layer, path, tell, check=False)


def _member(archive: tarfile.TarFile, name: str) -> IO[bytes]:
    file = archive.extractfile(name)
    if file is None:
        raise ValueError(f"{name} is no file")
    return file


def _take(file: IO[bytes], layer: Layer, path: Path, tell: Tell, check: bool = True) -> None:
    digest = hashlib.sha256()
    with open(path, "wb") as target:
        while piece := file.read(1 << 20):
            target.write(piece)
            digest.update(piece)
            tell(len(piece))
    if check and f"sha256:{digest.hexdigest()}" != layer.digest:
        path.unlink()
        raise UserError(f"{layer.digest} holds something else", "blobs as their digests say")


class Remote:
    """One image of a container registry; one thread's."""

    def __init__(self, reference: str, mirrors: Mapping[str, str]) -> None:
        match = REFERENCE.fullmatch(reference)
        if match is None:
            raise UserError(
                f"docker://{reference}", "docker://[HOST[:PORT]/]NAME[:TAG][@sha256:...]"
            )
        host, path = match["host"] or HUB, match["path"]
        self._source = f"docker://{reference}"
        self._repository = f"library/{path}" if host == HUB and "/" not in path else path
        self._tag = match["digest"] or match["tag"] or "latest"
        plain = "http" if LOOPBACK.fullmatch(host) else "https"
        own = f"{plain}://{HUB_HOST if host == HUB else host}"
        self._bases = [*([mirrors[host].rstrip("/")] if host in mirrors else []), own]
        self._authorization: dict[str, str] = {}
        proxy = urllib.request.getproxies().get("https")
        settings: dict[str, Any] = {"retries": RETRIES, "timeout": TIMEOUT}
        self._pool = (
            urllib3.ProxyManager(proxy, **settings)
            if proxy and not urllib.request.proxy_bypass(host)
            else urllib3.PoolManager(**settings)
        )

    def manifest(self) -> Manifest:
        body = self._small("manifests", self._tag)
        try:
            return follow(body, "", self._source, self._small)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            if isinstance(error, UserError):
                raise
            raise UserError(f"{self._source}: {error!r}", "an image of schema version 2") from None

    def blob(self, layer: Layer, path: Path, tell: Tell) -> None:
        failures = 0
        path.touch()
        while (have := path.stat().st_size) < layer.size or layer.size == 0:
            try:
                headers = {"Range": f"bytes={have}-"} if have else {}
                reply = self._ask(f"blobs/{layer.digest}", headers)
                with open(path, "ab" if reply.status == 206 else "wb") as file:
                    for piece in reply.stream(1 << 20, decode_content=False):
                        if file.tell() + len(piece) > layer.size:
                            reply.close()
                            raise self._longer(layer)
                        file.write(piece)
                        tell(len(piece))
                if layer.size == 0:
                    break
                problem = "it is shorter than the image says"
            except HTTPError as error:
                problem = str(error)
            failures = 0 if path.stat().st_size > have else failures + 1
            if failures >= TRIES:
                with open(path, "rb") as file:
                    if f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}" == layer.digest:
                        raise self._another_size(layer)
                raise StorageError(f"{self._source}: {layer.digest} was cut: {problem}")
        with open(path, "rb") as file:
            if f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}" == layer.digest:
                return
        path.unlink()
        raise StorageError(f"{self._source}: the registry sent something else than {layer.digest}")

    def _longer(self, layer: Layer) -> Exception:
        """Returns the error for a blob that is longer than its manifest says: the manifest is to
        blame if the blob is what its digest says; else the registry is.
        """
        digest, count = hashlib.sha256(), 0
        reply = self._ask(f"blobs/{layer.digest}", {})
        for piece in reply.stream(1 << 20, decode_content=False):
            digest.update(piece)
            count += len(piece)
            if count > layer.size + LIE_BYTES:
                break
        reply.close()
        if f"sha256:{digest.hexdigest()}" == layer.digest:
            return self._another_size(layer)
        return StorageError(f"{self._source}: {layer.digest} is longer than {layer.size} bytes")

    def _another_size(self, layer: Layer) -> UserError:
        return UserError(
            f"{self._source}: {layer.digest} has not {layer.size} bytes", "the size of the blob"
        )

    def _small(self, kind: str, name: str) -> bytes:
        """A manifest or a configuration, checked by its digest or, for a tag, by the reply's."""
        headers = {"Accept": ", ".join(MANIFESTS)}
        try:
            reply = self._ask(f"{kind}/{name}", headers)
            body = bytes(reply.read(MANIFEST_BYTES + 1, decode_content=False))
            reply.close()
            digest = reply.headers.get("Docker-Content-Digest", "")
        except HTTPError as error:
            raise StorageError(f"{self._source}: {error}") from error
        if len(body) > MANIFEST_BYTES:
            raise UserError(f"{self._source}: {kind}/{name}", f"at most {MANIFEST_BYTES} bytes")
        expected = name if DIGEST.fullmatch(name) else digest
        if DIGEST.fullmatch(expected) and f"sha256:{hashlib.sha256(body).hexdigest()}" != expected:
            raise StorageError(f"{self._source}: the registry sent something else than {expected}")
        return body

    def _ask(self, rest: str, headers: Mapping[str, str]) -> urllib3.BaseHTTPResponse:
        """A reply that is well, from the first base that has it; asks for a token where needed."""
        problem: Exception | None = None
        for base in tuple(self._bases):
            url = f"{base}/v2/{self._repository}/{rest}"
            try:
                before = self._authorization.get(base, "")
                reply, challenge = self._get(base, url, headers, before)
                if challenge:
                    try:
                        self._authorize(base, challenge)
                    except ProrlError:
                        reply.close()
                        raise
                    if (token := self._authorization.get(base, "")) != before:
                        reply.close()  # never read to its end, which may never come
                        reply, _ = self._get(base, url, headers, token)
            except MaxRetryError as error:
                problem = StorageError(f"{self._source}: {base} does not answer: {error.reason}")
                continue
            except ProrlError as error:
                problem = error
                continue
            if reply.status in (200, 206):
                return reply
            text = reply.read(200, decode_content=False).decode("utf-8", "replace")
            reply.close()
            if reply.status == 416:
                raise HTTPError(f"nothing at {headers.get('Range')}")
            answered = f"{self._source}: {base} answered {reply.status} {text}"
            if reply.status in (401, 403):  # this node's: its login is missing, or has expired
                problem = StorageError(
                    f"{answered}; `docker login` and `podman login` write the credentials that"
                    " this node reads"
                )
            elif reply.status != 404:
                problem = StorageError(answered)
            elif problem is None:
                problem = UserError(
                    answered, "an image that is there", "it is asked for again after a minute"
                )
        assert problem is not None
        raise problem

    def _get(
        self, base: str, url: str, headers: Mapping[str, str], authorization: str
    ) -> tuple[urllib3.BaseHTTPResponse, str]:
        """The reply to a request, behind redirects, and the challenge of the one that was asked.

        `authorization` goes to the origin of the first request alone, and a challenge of another
        origin is none of the registry's. Raises UserError for a redirect that `check_target`
        refuses, StorageError for too many, HTTPError.
        """
        first = origin(url)
        for _ in range(MAX_REDIRECTS + 1):
            is_first = origin(url) == first
            secret = {"Authorization": authorization} if authorization and is_first else {}
            reply = self._pool.request(
                "GET", url, headers={**headers, **secret}, redirect=False, preload_content=False
            )
            location = reply.get_redirect_location()
            if not location:
                challenge = reply.headers.get("WWW-Authenticate", "")
                return reply, challenge if is_first and reply.status == 401 else ""
            reply.close()
            with suppress(ValueError):  # which `check_target` refuses
                location = urljoin(url, location)
            url = location
            check_target(base, url, f"{self._source}: {base} redirects to")
        raise StorageError(f"{self._source}: {base} redirects more than {MAX_REDIRECTS} times")

    def _authorize(self, base: str, challenge: str) -> None:
        """Answer `WWW-Authenticate`: basic credentials, or a token of the realm that it names."""
        kind, _, rest = challenge.partition(" ")
        basic = _credentials(base.partition("://")[2])
        if kind.lower() == "basic" and basic:
            self._authorization[base] = f"Basic {basic}"
        if kind.lower() != "bearer":
            return
        words = dict(re.findall(r'(?<!\w)(\w+)="([^"]*)"', rest))
        realm = words.get("realm", "")
        check_target(base, realm, f"{self._source}: {base} has a token server at")
        fields = {"scope": f"repository:{self._repository}:pull"}
        fields |= {"service": words["service"]} if "service" in words else {}
        url = f"{realm}{'&' if '?' in realm else '?'}{urlencode(fields)}"
        try:
            reply, _ = self._get(base, url, {}, f"Basic {basic}" if basic else "")
            body = reply.read(MANIFEST_BYTES, decode_content=False)
            reply.close()
            grant = json.loads(body) if reply.status == 200 else {}
            token = grant.get("token") or grant.get("access_token")
        except UserError:
            raise
        except (HTTPError, ValueError, AttributeError, RecursionError) as error:
            raise StorageError(f"{self._source}: token server {realm!r}: {error}") from error
        if isinstance(token, str) and token.isprintable():
            self._authorization[base] = f"Bearer {token}"


def check_target(base: str, url: str, label: str) -> None:
    """Raise UserError for an address that a registry may not have this node ask.

    Https proves who answers, so nothing in a private network takes such a request unless it is
    meant to. A plain line is for registries that have one themselves, on this host or as a mirror,
    and leads neither to the metadata of a cloud nor from elsewhere to this host.
    """
    try:
        (scheme, host, _), (own_scheme, own_host, _) = origin(url), origin(base)
    except LocationParseError:
        scheme = host = own_scheme = own_host = ""
    if host and scheme == "https":
        return
    if host and scheme == own_scheme == "http":
        addresses = addresses_of(host)
        reaches_us = any(address.is_loopback for address in addresses)
        own_is_us = any(address.is_loopback for address in addresses_of(own_host))
        if (own_is_us or not reaches_us) and not any(
            address.is_link_local or address.is_unspecified for address in addresses
        ):
            return
    raise UserError(
        f"{label} {url!r:.200}",
        "an https address, or one beside a registry that is plain http itself",
        "`sandbox.mirrors` names another place for the images of a registry",
    )


def origin(url: str) -> tuple[str, str, int]:
    """The scheme, host and port of an address. Raises LocationParseError."""
    parsed = parse_url(url)
    scheme = parsed.scheme or ""
    return scheme, (parsed.host or "").strip("[]"), parsed.port or PORTS.get(scheme, 0)


def addresses_of(host: str) -> list[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    """The addresses that a name has here; none where only a proxy resolves it."""
    try:
        entries = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    addresses = [ipaddress.ip_address(str(entry[4][0]).partition("%")[0]) for entry in entries]
    return [getattr(address, "ipv4_mapped", None) or address for address in addresses]


def _credentials(host: str) -> str:
    """`user:password` in base64 of the first file of docker's or podman's that knows the host."""
    home, env = Path.home(), os.environ
    places = [Path(env["REGISTRY_AUTH_FILE"])] if env.get("REGISTRY_AUTH_FILE") else []
    if env.get("XDG_RUNTIME_DIR"):
        places.append(Path(env["XDG_RUNTIME_DIR"], "containers/auth.json"))
    places.append(home / ".config/containers/auth.json")
    places.append(Path(env.get("DOCKER_CONFIG") or home / ".docker", "config.json"))
    keys = (host, f"https://{host}", *((HUB, HUB_KEY) if host == HUB_HOST else ()))
    for place in places:
        try:
            auths = json.loads(place.read_bytes()).get("auths") or {}
        except (OSError, ValueError):
            continue
        for key in keys:
            if auth := (auths.get(key) or {}).get("auth"):
                base64.b64decode(auth, validate=True)
                return str(auth)
    return ""
