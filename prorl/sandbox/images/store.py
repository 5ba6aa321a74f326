"""The store by which nodes share the images that are built from Dockerfiles: one builds, others
fetch.

    URL/images/NAME      the image's configuration and the sizes of its layers; written last
    URL/layers/DIFF_ID   the archive of a layer, compressed by zstd; images share it
    URL/claims/NAME      who builds the image now, written anew every BEAT_S

A store is a folder of any file system that fsspec opens. What is in it is checked as it enters: the
record is bounded, a layer is read up to its size, and `unpack` refuses what its digest does not
name. Who may write to a store decides what images hold, as with a registry.

A claim only saves work. Two nodes that build the same image both succeed, and the last record
counts. The store is not bounded: whatever is removed from it is built again.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from prorl.errors import ProrlError, StorageError, UserError
from prorl.sandbox.images.remote import (
    DIGEST,
    MANIFEST_BYTES,
    Archive,
    Layer,
    Manifest,
    Tell,
    described,
)
from prorl.sandbox.images.unpack import compress
from prorl.waits import wait_limit_s

FOLDERS = ("images", "layers", "claims")
CLAIM_S = wait_limit_s("image.claim")
BEAT_S = wait_limit_s("image.claim_beat")
MAX_CLAIM_BYTES = 4096
"""Whoever may write to the store may write a claim. Ours have below 300: host, 16 digits, count."""
LOOK_S = 0.5
"""Between two looks at an image that another node builds: few requests, and no build is faster."""


class ImageStoreError(StorageError):
    """A store cannot be read or written, or holds something else than it says."""


class ImageStore:
    """The images of one store, used by one thread. A builder of which nothing was read for
    `silence_s` is dead.
    """

    def __init__(self, url: str, silence_s: float = CLAIM_S) -> None:
        self._silence_s = silence_s
        with _explained(url):
            self._fs, self._root = fsspec.core.url_to_fs(url)
            if isinstance(self._fs, LocalFileSystem):
                for name in FOLDERS:
                    os.makedirs(f"{self._root}/{name}", exist_ok=True)

    def find(self, name: str) -> SharedImage | None:
        path = self._path("images", name)
        with _explained(path):
            try:
                record = self._fs.cat_file(path, end=2 * MANIFEST_BYTES + 1)
            except FileNotFoundError:
                return None
        return SharedImage(self, bytes(record), path)

    @contextmanager
    def claimed(self, name: str, *, can_build: bool) -> Iterator[SharedImage | None]:
        """Yields the image, after another node has built it; None where the caller is to build it,
        which others wait for until the block ends.

        Raises StorageError where no node builds it and this one cannot.
        """
        claim, own = self._path("claims", name), f"{socket.gethostname()} {secrets.token_hex(8)}"
        seen, since = b"", time.monotonic()
        while (image := self.find(name)) is None:
            content = self._claim(claim, own if can_build else "")
            if content is None:
                break
            if not content:
                raise StorageError(
                    f"{name} is not in {self._root}, no node builds it, and this one has neither"
                    " buildah nor podman: `apt-get install buildah`"
                )
            if content != seen:
                seen, since = content, time.monotonic()
            elif time.monotonic() - since > self._silence_s:
                self._remove(claim)  # its builder died
            time.sleep(LOOK_S)
        else:
            yield image
            return
        ended = threading.Event()
        beating = threading.Thread(target=self._beat, args=(claim, own, ended), daemon=True)
        beating.start()
        try:
            # another may have ended between the look and the claim
            yield self.find(name)
        finally:
            ended.set()
            beating.join()
            self._remove(claim)

    def put(self, name: str, archive: Path, work: Path, *, replaces: bool) -> None:
        """Store an image of a docker-archive; layers that are there stay, unless it `replaces` what
        could not be read. Raises ImageStoreError.
        """
        source, sizes = Archive(archive, ""), {}
        manifest, config = source.read()
        plain, packed = work / "layer.tar", work / "layer.zst"
        for layer in dict.fromkeys(manifest.layers):
            path = self.path_of(layer.diff_id)
            with _explained(path):
                if replaces or not self._fs.exists(path):
                    source.blob(layer, plain, lambda _: None)
                    compress(plain, packed)
                    self._write(path, packed)
                self._fs.invalidate_cache()
                sizes[layer.diff_id] = self._fs.size(path)
        record = {
            "config": config.decode(),
            "layers": [sizes[layer.diff_id] for layer in manifest.layers],
        }
        note, path = work / "record.json", self._path("images", name)
        note.write_text(json.dumps(record))
        with _explained(path):
            self._write(path, note)

    def path_of(self, diff_id: str) -> str:
        return self._path("layers", diff_id.removeprefix("sha256:"))

    def read(self, path: str, target: Path, size: int, tell: Tell) -> None:
        """Copy a file of `size` bytes to a path here. Raises ImageStoreError."""
        with _explained(path), self._fs.open(path, "rb") as file, open(target, "wb") as copy:
            while piece := file.read(1 << 20):
                if copy.tell() + len(piece) > size:
                    raise ImageStoreError(f"{path} is longer than {size} bytes")
                copy.write(piece)
                tell(len(piece))

    def _path(self, folder: str, name: str) -> str:
        return f"{self._root}/{folder}/{name}"

    def _write(self, path: str, source: Path) -> None:
        """Put a file, whole or not at all: object stores do so themselves."""
        if isinstance(self._fs, LocalFileSystem):
            part = f"{path}.{secrets.token_hex(4)}"
            self._fs.put_file(str(source), part)
            os.replace(part, path)
        else:
            self._fs.put_file(str(source), path)

    def _claim(self, claim: str, own: str) -> bytes | None:
        """Takes the claim where it is free: None. Else what its owner wrote; empty for a free one
        where `own` is empty.
        """
        with _explained(claim):
            for _ in range(2):  # it may be released between the two calls
                with suppress(FileExistsError):
                    if own:
                        self._create(claim, own.encode())
                        return None
                with suppress(FileNotFoundError):
                    return bytes(self._fs.cat_file(claim, end=MAX_CLAIM_BYTES)) or b"?"
        return b"?" if own else b""

    def _create(self, path: str, content: bytes) -> None:
        """Raises FileExistsError. fsspec's own way for local files is not atomic."""
        if isinstance(self._fs, LocalFileSystem):
            with open(path, "xb") as file:
                file.write(content)
        else:
            self._fs.pipe_file(path, content, mode="create")

    def _beat(self, claim: str, own: str, ended: threading.Event) -> None:
        number = 0
        while not ended.wait(BEAT_S):
            number += 1
            with suppress(ImageStoreError), _explained(claim):
                self._fs.pipe_file(claim, f"{own} {number}".encode())

    def _remove(self, claim: str) -> None:
        with suppress(FileNotFoundError, ImageStoreError), _explained(claim):
            self._fs.rm_file(claim)


class SharedImage:
    """An image of a store, as `Pull` takes it."""

    def __init__(self, store: ImageStore, record: bytes, path: str) -> None:
        self._store, self._record, self._path = store, record, path

    def manifest(self) -> Manifest:
        try:
            if len(self._record) > 2 * MANIFEST_BYTES:
                raise ValueError(f"more than {2 * MANIFEST_BYTES} bytes")
            record = json.loads(self._record)
            config, sizes = str(record["config"]).encode(), list(record["layers"])
            diff_ids = json.loads(config)["rootfs"]["diff_ids"]
            blobs = [(name, size) for name, size in zip(diff_ids, sizes, strict=True)]
            if not all(DIGEST.fullmatch(name) for name, _ in blobs):
                raise ValueError("a digest that is none")
            return described(config, f"sha256:{hashlib.sha256(config).hexdigest()}", blobs)
        except (ValueError, KeyError, TypeError, RecursionError, UserError) as error:
            raise ImageStoreError(f"{self._path} is no record of an image: {error}") from None

    def blob(self, layer: Layer, path: Path, tell: Tell) -> None:
        self._store.read(self._store.path_of(layer.diff_id), path, layer.size, tell)


@contextmanager
def _explained(label: str) -> Iterator[None]:
    """Raises ImageStoreError for what a file system raises; AWS's client has errors of its own."""
    boto: Any = sys.modules.get("botocore.exceptions")
    failures = (OSError, ValueError, ImportError, *((boto.BotoCoreError,) if boto else ()))
    try:
        yield
    except ProrlError:
        raise
    except failures as error:
        raise ImageStoreError(f"{label}: {error}") from error
