"""Nodes share what they build by a store: one builds, others fetch, and a broken store costs a
build and no task.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from prorl.errors import SandboxError, StorageError, UserError
from prorl.sandbox.images import dockerfile
from prorl.sandbox.images.cache import ImageCache
from prorl.sandbox.images.dockerfile import name_of
from prorl.sandbox.images.pull import Pull
from prorl.sandbox.images.registry import Registry
from prorl.sandbox.images.stack import merge
from prorl.sandbox.images.store import ImageStore, ImageStoreError
from prorl.sandbox.images.tree import digest_of
from tests.sandbox.image_sources import BASE, Entry, archive
from tests.sandbox.image_sources import digest_of as sha256
from tests.sandbox.test_image_build import dockerfile as make_folder
from tests.sandbox.test_image_build import needs_buildah


@pytest.fixture(params=["a folder", pytest.param("S3", marks=pytest.mark.slow)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "a folder":
        yield str(tmp_path / "store")
        return
    pytest.importorskip("moto.server", reason="needs moto[server] (an S3 server in Python)")
    s3fs = pytest.importorskip("s3fs", reason="needs the extra s3")
    from tests.storage.s3_server import s3_server

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    with s3_server() as (endpoint, _), pytest.MonkeyPatch.context() as patch:
        for name, value in (
            ("ENDPOINT_URL", endpoint),
            ("ACCESS_KEY_ID", "a"),
            ("SECRET_ACCESS_KEY", "b"),
            ("DEFAULT_REGION", "us-east-1"),
        ):
            patch.setenv(f"AWS_{name}", value)
        s3fs.S3FileSystem.clear_instance_cache()
        bucket = f"shared-{uuid.uuid4().hex[:8]}"
        s3fs.S3FileSystem().mkdir(bucket)
        yield f"s3://{bucket}/images"
        s3fs.S3FileSystem.clear_instance_cache()


def saved(place: Path, *layers: bytes) -> Path:
    """Writes a docker-archive of an image with these layers."""
    diff_ids = [sha256(layer) for layer in layers]
    config = json.dumps({"config": {"WorkingDir": "/app"}, "rootfs": {"diff_ids": diff_ids}})
    names = [f"{number}.tar" for number in range(len(layers))]
    manifest = [{"Config": "config.json", "RepoTags": None, "Layers": names}]
    entries = [
        Entry("manifest.json", json.dumps(manifest).encode()),
        Entry("config.json", config.encode()),
        *(Entry(name, layer) for name, layer in zip(names, layers, strict=True)),
    ]
    place.write_bytes(archive(*entries))
    return place


def test_what_is_put_into_a_store_comes_out_of_it_and_what_is_broken_does_not(
    url: str, registry: Registry, tmp_path: Path
) -> None:
    store = ImageStore(url)
    low, top = archive(*BASE), archive(Entry("etc/own", b"own" * 1000))
    with store.claimed("one", can_build=True) as image:
        assert image is None
        store.put("one", saved(tmp_path / "a.tar", low, top), tmp_path, replaces=False)
    store.put("two", saved(tmp_path / "b.tar", low, archive()), tmp_path, replaces=False)
    with store.claimed("one", can_build=False) as image:
        assert image is not None
        pulled = Pull(registry, {}).image(image, "one")
    tree = tmp_path / "tree"
    merge(registry.stack(pulled.digest)[::-1], tree)
    assert (tree / "etc/own").read_bytes() == b"own" * 1000
    assert (tree / ".prorl-workdir").read_text() == "/app\nroot\n"

    broken = tmp_path / "other.tar"
    broken.write_bytes(archive(Entry("etc/own", b"else")))
    for damage in ("another layer", "a longer layer", "a record"):
        path = store.path_of(sha256(top)) if "layer" in damage else f"{url}/images/one"
        content = b"x" * (300 if damage == "another layer" else 1 << 20)
        store._fs.pipe_file(path, content)
        other = Registry(tmp_path / damage)
        image = ImageStore(url).find("one")
        assert image is not None
        with pytest.raises((ImageStoreError, UserError)):
            Pull(other, {}).image(image, "one")
        assert not [each for each in other.list() if not each.is_layer]
    store.put("one", saved(tmp_path / "a.tar", low, top), tmp_path, replaces=True)
    image = store.find("one")
    assert image is not None
    Pull(Registry(tmp_path / "mended"), {}).image(image, "one")


def test_a_single_node_has_the_claim_until_it_ends_or_dies(url: str) -> None:
    with pytest.raises(StorageError, match="no node builds it, and this one has neither"):
        ImageStore(url).claimed("one", can_build=False).__enter__()
    first = ImageStore(url).claimed("one", can_build=True)
    assert first.__enter__() is None
    building = threading.Event()

    def build() -> None:
        with ImageStore(url).claimed("one", can_build=True):
            building.set()

    other = threading.Thread(target=build)
    other.start()
    assert not building.wait(1.0), "the first one has it"
    first.__exit__(None, None, None)
    other.join(60.0)
    assert building.is_set()
    dead = ImageStore(url)
    assert dead._claim(dead._path("claims", "one"), "a node that dies") is None
    with ImageStore(url, silence_s=0.0).claimed("one", can_build=True) as image:
        assert image is None


@pytest.mark.slow
@needs_buildah
async def test_an_image_is_built_by_a_single_node_and_fetched_by_the_others(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_folder(tmp_path, base, "WORKDIR /app\nRUN echo ours > made\n")
    real, counted = dockerfile.program(), tmp_path / "counted"
    builder = tmp_path / "bin" / os.path.basename(real)
    builder.parent.mkdir()
    builder.write_text(f'#!/bin/bash\necho "$1" >> {counted}\nexec {real} "$@"\n')
    builder.chmod(0o755)
    path = f"{builder.parent}:{os.environ['PATH']}"
    monkeypatch.setenv("PATH", path)
    settings = {"store": str(tmp_path / "store")}
    assert name_of(folder, settings) == name_of(folder, {})

    def builds() -> int:
        return counted.read_text().split().count("build")

    async def locate(node: str, **more: object) -> tuple[str, ...]:
        cache = ImageCache(tmp_path / node, build={**settings, **more})
        try:
            return await cache.locate(f"dockerfile:{folder}")
        finally:
            await cache.close()

    stacks = list(await asyncio.gather(locate("first"), locate("second")))
    assert builds() == 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", "/nowhere")
        stacks.append(await locate("a node that cannot build"))
        with pytest.raises(SandboxError, match="no node builds it") as caught:
            await locate("another digest", args={"A": "1"})
        assert caught.value.code == "sandbox_start"
    trees = [tmp_path / f"tree{number}" for number in range(len(stacks))]
    for tree, stack in zip(trees, stacks, strict=True):
        merge(stack[::-1], tree)
    assert len({digest_of(str(tree)) for tree in trees}) == 1
    assert (trees[0] / "app/made").read_text() == "ours\n"

    for layer in (tmp_path / "store/layers").iterdir():
        layer.write_bytes(layer.read_bytes()[:-1] + b"?")
    await locate("a node that finds a broken layer")
    assert builds() == 2, "it built the image, and put it into the place of what was broken"
    monkeypatch.setenv("PATH", "/nowhere")
    await locate("the next node")
    shutil.rmtree(tmp_path / "store")
    (tmp_path / "store").write_text("no folder")
    monkeypatch.setenv("PATH", path)
    await locate("a node whose store is broken")
    assert builds() == 3
