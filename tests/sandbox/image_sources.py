"""Images made by hand, and a container registry of our own that can be told to misbehave."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import ssl
import subprocess
import tarfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

OCI = "application/vnd.oci.image"
TOKEN = "let-me-in"


class Entry(NamedTuple):
    """One entry of a layer; a file unless `kind` says otherwise."""

    name: str
    content: bytes = b""
    mode: int = 0o644
    kind: bytes = tarfile.REGTYPE
    link: str = ""


def folder(name: str, mode: int = 0o755) -> Entry:
    return Entry(name, mode=mode, kind=tarfile.DIRTYPE)


BASE = (folder("bin"), Entry("bin/bash", b"#!", 0o755), folder("etc"), Entry("etc/hosts", b"h"))
"""The least that counts as an image."""


def archive(*entries: Entry) -> bytes:
    """A layer's tar archive."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as target:
        for entry in entries:
            info = tarfile.TarInfo(entry.name)
            info.mode, info.type, info.linkname = entry.mode, entry.kind, entry.link
            info.size, info.mtime = len(entry.content), 1_000_000_000
            target.addfile(info, io.BytesIO(entry.content))
    return buffer.getvalue()


def packed(folder: Path) -> bytes:
    """A layer's tar archive of all that is in a folder."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as target:
        target.add(folder, arcname=".")
    return buffer.getvalue()


def digest_of(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


@cache
def _compressed(layer: bytes) -> bytes:
    return gzip.compress(layer, 1, mtime=0)


class Blobs(dict[str, bytes]):
    """Blobs by digest, and manifests by digest or tag, as a registry or a layout has them."""

    def put(self, data: bytes) -> dict[str, Any]:
        self[digest_of(data)] = data
        return {"digest": digest_of(data), "size": len(data)}

    def image(self, tag: str, *layers: bytes, **config: Any) -> bytes:
        """Add an image of these archives; its manifest."""
        about = {
            "architecture": "amd64",
            "os": "linux",
            "config": config,
            "rootfs": {"type": "layers", "diff_ids": [digest_of(layer) for layer in layers]},
        }
        manifest = {
            "schemaVersion": 2,
            "mediaType": f"{OCI}.manifest.v1+json",
            "config": {
                "mediaType": f"{OCI}.config.v1+json",
                **self.put(json.dumps(about).encode()),
            },
            "layers": [
                {"mediaType": f"{OCI}.layer.v1.tar+gzip", **self.put(_compressed(layer))}
                for layer in layers
            ],
        }
        self[tag] = data = json.dumps(manifest).encode()
        self.put(data)
        return data

    def layout(self, place: Path) -> Path:
        """Write all of it as an OCI layout."""
        (place / "blobs" / "sha256").mkdir(parents=True)
        index = []
        for name, data in self.items():
            if name.startswith("sha256:"):
                (place / "blobs" / "sha256" / name[7:]).write_bytes(data)
            else:
                named = {"org.opencontainers.image.ref.name": name}
                index.append(
                    {
                        "mediaType": f"{OCI}.manifest.v1+json",
                        "digest": digest_of(data),
                        "size": len(data),
                        "annotations": named,
                    }
                )
        (place / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": index}))
        (place / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
        return place


class RegistryServer(ThreadingHTTPServer):
    """Serves blobs by registry protocol 2; says what it was asked."""

    def __init__(self, blobs: Blobs) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.blobs = blobs
        self.downloads: list[tuple[str, str]] = []
        """Path and `Range` of each request for a blob or a manifest that was let in."""
        self.sent = 0
        self.tokens = False
        """Ask for a token, as the public registries do."""
        self.busy, self.busy_status = 0, 429
        """So many requests get this status first."""
        self.cut_at = 0
        """The next blob longer than this ends there."""
        self.secrets: list[str] = []
        """`Authorization` of each request for a token."""
        self.redirects: dict[str, str] = {}
        """Where a manifest, a blob or `token` is instead, by its name."""
        self.lengths: dict[str, int] = {}
        """What is added to the `Content-Length` of a manifest or a blob, by its name."""
        self.requests: list[tuple[str, str]] = []
        """Path and `Authorization` of each request."""

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: RegistryServer

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        server = self.server
        name = self.path.partition("?")[0].rpartition("/")[2]
        server.requests.append((self.path, self.headers.get("Authorization", "")))
        if name in server.redirects:
            self._send(307, b"", {"Location": server.redirects[name]})
        elif name == "token":
            server.secrets.append(self.headers.get("Authorization", ""))
            self._send(200, json.dumps({"token": TOKEN}).encode())
        elif server.tokens and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            realm = f'Bearer realm="http://{server.host}/token",service="test",scope="x"'
            self._send(401, b"{}", {"WWW-Authenticate": realm})
        elif server.busy:
            server.busy -= 1
            self._send(server.busy_status, b"{}", {"Retry-After": "0"})
        elif (data := server.blobs.get(name)) is None:
            self._send(404, b'{"errors": []}')
        else:
            byte_range = self.headers.get("Range", "")
            server.downloads.append((self.path, byte_range))
            begin = int(byte_range.removeprefix("bytes=").rstrip("-") or 0)
            length = {
                "Content-Length": str(max(len(data) - begin + server.lengths.get(name, 0), 0))
            }
            headers = {**length, "Docker-Content-Digest": digest_of(data)}
            headers |= {"Connection": "close"} if name in server.lengths else {}
            self._send(206 if begin else 200, data[begin:], headers, cut="/blobs/" in self.path)

    def _send(
        self, status: int, body: bytes, headers: dict[str, str] | None = None, *, cut: bool = False
    ) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if cut and self.server.cut_at and len(body) > self.server.cut_at:
            body, self.server.cut_at, self.close_connection = body[: self.server.cut_at], 0, True
        self.server.sent += len(body)
        self.wfile.write(body)


@contextmanager
def serving(blobs: Blobs, tls: ssl.SSLContext | None = None) -> Iterator[RegistryServer]:
    """A registry on this host's loopback for as long as the block."""
    with RegistryServer(blobs) as server:
        if tls is not None:
            server.socket = tls.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def debians_registry(place: Path) -> Iterator[str]:
    """Debian's docker-registry over a folder of its own, soon: its host and port."""
    with serving(Blobs()) as free:
        host = free.host
    (place / "registry.yml").write_text(
        "version: 0.1\nlog: {level: error, accesslog: {disabled: true}}\n"
        f"storage: {{filesystem: {{rootdirectory: {place}/registry}}}}\nhttp: {{addr: '{host}'}}\n"
    )
    served = ["docker-registry", "serve", str(place / "registry.yml")]
    silent = subprocess.DEVNULL
    with subprocess.Popen(served, stdout=silent, stderr=silent) as process:
        try:
            yield host
        finally:
            process.terminate()
