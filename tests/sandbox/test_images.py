"""Images in sandboxes: by name, as a folder, as a .sif that is unpacked once a node; made here
without any registry.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from prorl.errors import ConflictError, SandboxError
from prorl.sandbox.images.cache import ImageCache
from prorl.sandbox.images.child import make_image
from prorl.sandbox.images.registry import Registry
from prorl.sandbox.kinds.engine_support import program
from prorl.types import IMAGE_WORKDIR, FailureCode, SandboxSpec
from tests.faults.leftovers import marked
from tests.sandbox.conftest import IMAGE_KINDS, Sandboxd, end, start_daemon
from tests.sandbox.image_sources import Blobs, Entry, archive, packed, serving
from tests.waiting import until


async def ask(
    daemon: Sandboxd, spec: SandboxSpec, command: str, owner: str = "run/1/1"
) -> tuple[int | None, str]:
    ref = await daemon.host.start(owner, "run", spec)
    async with daemon.host.connect(ref) as sandbox:
        done = await sandbox.call("bash", {"command": command}, 20.0)
    await daemon.host.stop(ref)
    return done.exit_code, done.output


@pytest.mark.parametrize("kind", IMAGE_KINDS, indirect=True)
async def test_a_folder_without_python(folder: Path, base: Path, kind: str) -> None:
    daemon = await start_daemon(kind, folder)
    ref = await daemon.host.start("run/1/1", "run", SandboxSpec(image=str(base)))
    async with daemon.host.connect(ref) as sandbox:
        done = await sandbox.call("bash", {"command": "cat /etc/image-name; touch /etc/x"}, 10.0)
        assert done.output.startswith("mine\n")
        assert done.exit_code != 0, "the image is read-only"
        assert (await sandbox.call("python", {"code": "6 * 7"}, 10.0)).output == "42\n"
    await end(daemon)


@pytest.mark.parametrize("kind", IMAGE_KINDS, indirect=True)
async def test_a_name_of_the_registry(folder: Path, base: Path, kind: str) -> None:
    registry = Registry(folder / "images")
    await make_image(registry.root, {"do": "build", "name": "mine", "source": str(base)}, 60.0)
    daemon = await start_daemon(kind, folder, images=str(registry.root), image="mine")
    assert await ask(daemon, SandboxSpec(), "cat /etc/image-name") == (0, "mine\n")
    with pytest.raises(SandboxError, match=r"no image 'other' .* there are: mine") as caught:
        await daemon.host.start("run/2/1", "run", SandboxSpec(image="other"))
    assert caught.value.code is FailureCode.BAD_TASK
    with pytest.raises(ConflictError, match="in use"):
        registry.forget("mine")
    await end(daemon)
    registry.forget("mine")


@pytest.mark.parametrize("kind", IMAGE_KINDS, indirect=True)
async def test_a_pulled_stack_is_run_as_it_is_and_pulled_by_the_first_who_needs_it(
    folder: Path, base: Path, kind: str
) -> None:
    blobs = Blobs()
    top_layer = archive(Entry("etc/.wh.image-name"), Entry("etc/own", b"own\n"))
    blobs.image("v1", packed(base), top_layer, Env=["MINE=yes", "PATH=/usr/bin:/first"])
    with serving(blobs) as server:
        mirrors = {"docker.io": f"http://{server.host}"}
        daemon = await start_daemon(kind, folder, images=str(folder / "images"), mirrors=mirrors)
        spec = SandboxSpec(image="docker://team/x:v1")
        command = "cat /etc/own /etc/image-name 2>&1; touch /etc/x 2>/dev/null || echo $MINE"
        for owner in ("run/1/1", "run/1/2"):
            _, output = await ask(daemon, spec, command, owner)
            assert output.splitlines()[0::2] == ["own", "yes"]
            assert "No such file" in output
        written = SandboxSpec(image=spec.image, overlay_bytes=1 << 20, fakeroot=True)
        change = "echo new > /etc/own; cat /etc/own; id -u"
        assert await ask(daemon, written, change, "run/1/3") == (0, "new\n0\n")
        own = ("MINE=no", "PATH=/own/bin:/usr/bin", "HOME=/home")
        tasks = replace(written, workdir=IMAGE_WORKDIR, variables=own)
        _, values = await ask(daemon, tasks, "echo $MINE $HOME $USER $PATH", "run/1/5")
        assert values.startswith("no /home root /own/bin:/usr/bin:/first:")
        nowhere = f"docker://{server.host}/team/none"
        for image, why in ((nowhere, "404"), ("docker://other/x:v1", "is docker://")):
            with pytest.raises(SandboxError, match=why) as caught:
                await daemon.host.start("run/2/1", "run", SandboxSpec(image=image))
            assert caught.value.code is FailureCode.BAD_TASK
        registry = Registry(folder / "images")
        with pytest.raises(ConflictError, match="in use"):
            registry.forget("x_v1")
        ref = await daemon.host.start("run/1/4", "run", spec)
        async with daemon.host.connect(ref) as sandbox:
            assert registry.collect(older_than_s=0, keep_bytes=0) == (), "it is in use"
            done = await sandbox.call("bash", {"command": "cat /etc/own"}, 20.0)
            assert done.output == "own\n"
        await end(daemon)
        assert registry.names() == ["x_v1"]
        assert registry.collect(older_than_s=0, keep_bytes=0) != ()
        assert registry.list() == []
    layers = [path for path, _ in server.downloads if "/blobs/" in path]
    assert len(layers) == len(set(layers)) == 3


# ---- .sif


def counting(folder: Path, before: str = "") -> dict[str, str]:
    """A PATH on which `singularity` is the real one, and each call of it is counted."""
    (folder / "bin").mkdir()
    script = folder / "bin" / "singularity"
    script.write_text(
        f'#!/bin/bash\nif [ "$1" = build ]; then echo x >> {folder}/calls; {before}\nfi\nexec'
        f' {program()} "$@"\n'
    )
    script.chmod(0o755)
    (folder / "calls").touch()
    (folder / "calls").chmod(0o666)
    return {"PATH": f"{folder}/bin:{os.environ['PATH']}"}


@pytest.mark.apptainer
async def test_a_sif_is_unpacked_once_by_32_starts_of_two_daemons(
    folder: Path, sif: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", counting(folder)["PATH"])
    caches = [ImageCache(folder / "images") for _ in range(2)]
    located = await asyncio.gather(*(cache.locate(str(sif)) for cache in caches for _ in range(16)))
    assert len(set(located)) == 1
    assert Path(*located[0], "etc", "image-name").read_text() == "mine\n"
    assert (folder / "calls").read_text() == "x\n"
    for cache in caches:
        await cache.close()


@pytest.mark.apptainer
async def test_a_sif_that_changed_is_unpacked_again(folder: Path, sif: Path, place: Path) -> None:
    path = folder / "image.sif"
    shutil.copy(sif, path)
    cache = ImageCache(folder / "images")
    first = await cache.locate(str(path))
    assert await cache.locate(str(path)) == first
    path.write_bytes(sif.read_bytes() + b"\0")
    assert await cache.locate(str(path)) != first
    await cache.close()


@pytest.mark.apptainer
async def test_sigkill_of_sandboxd_while_it_unpacks(
    folder: Path, sif: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = f"63.{os.getpid()}"
    with monkeypatch.context() as slow:
        slow.setenv("PATH", counting(folder, f"sleep {mark}")["PATH"])
        daemon = await start_daemon("apptainer", folder, images=str(folder / "images"))
        starting = asyncio.create_task(
            daemon.host.start("run/1/1", "run", SandboxSpec(image=str(sif)))
        )
        await until(lambda: (folder / "calls").read_text())
        daemon.process.send_signal(signal.SIGKILL)
        with pytest.raises(SandboxError):
            await starting
        await daemon.process.wait()
        await daemon.host.close()
    await until(lambda: not marked(mark))
    assert Registry(folder / "images").list() == []
    daemon = await start_daemon("apptainer", folder, images=str(folder / "images"))
    assert await ask(daemon, SandboxSpec(image=str(sif)), "cat /etc/image-name") == (0, "mine\n")
    await end(daemon)
    assert list((folder / "images" / "work").iterdir()) == []


async def test_other_images_do_not_slow_a_start(folder: Path, base: Path) -> None:
    """However many there are: none of their names is read."""
    registry = Registry(folder / "images")
    await make_image(registry.root, {"do": "build", "name": "mine", "source": str(base)}, 60.0)
    registry.name("team_x", registry.digest_of_name("mine"))
    (registry.root / "names" / "another").mkdir()  # whoever reads it fails
    for name in ("mine", "docker://team/team_x"):
        cache = ImageCache(registry.root)
        assert await cache.locate(name) == (registry.find("mine").path,)
        await cache.close()


# ---- bad ones


async def test_a_bad_image_is_the_tasks_fault(folder: Path, base: Path) -> None:
    cache = ImageCache(folder / "images")
    (folder / "empty").mkdir()
    (folder / "text.sif").write_text("hello")
    for name, message in (
        ("nothing", "no image 'nothing' in"),
        ("relative/path", "expected a name of this node's registry, an absolute path or docker:"),
        ("docker://x/y:z", "image docker://x/y:z is not on this node"),
        ("/no/such/image", "No such file or directory"),
        (f"{folder}/empty", "it has no bash"),
        (f"{folder}/text.sif", "neither a folder nor a SIF file"),
    ):
        with pytest.raises(SandboxError, match=message) as caught:
            await cache.locate(name)
        assert caught.value.code is FailureCode.BAD_TASK
    await cache.close()


@pytest.mark.apptainer
async def test_a_broken_sif_is_the_tasks_fault_and_is_tried_once(
    folder: Path, sif: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", counting(folder)["PATH"])
    path = folder / "cut.sif"
    path.write_bytes(sif.read_bytes()[:200_000])
    cache = ImageCache(folder / "images")
    for _ in range(3):
        with pytest.raises(SandboxError, match="Apptainer made nothing: FATAL") as caught:
            await cache.locate(str(path))
        assert caught.value.code is FailureCode.BAD_TASK
    assert (folder / "calls").read_text() == "x\n"
    await cache.close()


@pytest.mark.apptainer
async def test_a_full_disk_is_not_the_tasks_fault(
    folder: Path, sif: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(
        "PATH",
        counting(folder, "echo 'FATAL: write: no space left on device' >&2; exit 255")["PATH"],
    )
    cache = ImageCache(folder / "images")
    with pytest.raises(SandboxError, match="no space left") as caught:
        await cache.locate(str(sif))
    assert caught.value.code is FailureCode.SANDBOX_START
    await cache.close()


async def test_a_kind_without_images_says_which_has_them(folder: Path) -> None:
    daemon = await start_daemon("local", folder)
    with pytest.raises(SandboxError, match="kind local runs none; use apptainer or pyns") as caught:
        await daemon.host.start("run/1/1", "run", SandboxSpec(image="/tmp"))
    assert caught.value.code is FailureCode.BAD_TASK
    await end(daemon)
