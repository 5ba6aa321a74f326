"""Images made by the real spython and Apptainer, from each kind of source; each of their traps ends
in one clear error.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from prorl.errors import ConflictError, SandboxError, StorageError, UserError
from prorl.sandbox.images.cache import ImageCache
from prorl.sandbox.images.child import make_image
from prorl.sandbox.images.dockerfile import adapt, name_of
from prorl.sandbox.images.maker import client_class, write_sif
from prorl.sandbox.images.pull import Pull
from prorl.sandbox.images.registry import Registry
from prorl.sandbox.images.stack import merge
from tests.faults.leftovers import marked
from tests.sandbox import small_image
from tests.sandbox.image_sources import Blobs, Entry, archive, packed
from tests.waiting import until

TIME_S = 90.0


async def build(
    registry: Registry, source: object, name: str = "made", timeout_s: float = TIME_S, **more: str
) -> Path:
    job = {"do": "build", "name": name, "source": str(source), **more}
    return Path((await make_image(registry.root, job, timeout_s)).path)


def definition(folder: Path, base: object, post: str, more: str = "") -> Path:
    """A definition file on top of another image."""
    path = folder / "test.def"
    path.write_text(f"Bootstrap: localimage\nFrom: {base}\n\n%post\n    {post}\n{more}")
    return path


async def test_from_a_folder(registry: Registry, base: Path) -> None:
    image = await build(registry, base)
    assert (image / "etc" / "image-name").read_text() == "mine\n"
    assert registry.find("made").source == str(base)


async def test_a_name_is_replaced_only_on_request(
    registry: Registry, base: Path, tmp_path: Path
) -> None:
    first = await build(registry, base)
    other = small_image.make_image(tmp_path)
    (other / "etc" / "image-name").write_text("other\n")
    with pytest.raises(UserError, match="--replace"):
        await build(registry, other)
    assert await build(registry, other, replace="1") != first


@pytest.mark.apptainer
async def test_from_a_sif(registry: Registry, sif: Path) -> None:
    image = await build(registry, sif)
    assert (image / "etc" / "image-name").read_text() == "mine\n"
    assert {
        path.stat().st_uid for path in (image, image / "etc", image / "etc" / "image-name")
    } == {os.getuid()}
    assert await build(registry, sif, "again") == image, "unpacked once"


@pytest.mark.apptainer
async def test_an_image_is_written_as_a_sif_that_is_the_same_image(
    registry: Registry, base: Path, tmp_path: Path
) -> None:
    image = shutil.copytree(base, tmp_path / "image", symlinks=True)
    (image / ".prorl-workdir").write_text("/app\nroot\n")
    await build(registry, image)
    write_sif(registry, "made", tmp_path / "made.sif")
    again = await build(registry, tmp_path / "made.sif", "again")
    for name in ("etc/image-name", ".prorl-workdir"):
        assert (again / name).read_text() == (image / name).read_text()
    with pytest.raises(ConflictError, match=r"made\.sif exists; expected a path that is free"):
        write_sif(registry, "made", tmp_path / "made.sif")


@pytest.mark.apptainer
@pytest.mark.parametrize("named", [True, False], ids=["a named image", "a .sif"])
async def test_from_a_definition_on_top_of(
    registry: Registry, sif: Path, tmp_path: Path, named: bool
) -> None:
    if named:
        await build(registry, sif, "base")
    post, more = "touch /etc/made && chown 33:33 /etc/made", "%environment\n    export NAME=value\n"
    image = await build(registry, definition(tmp_path, "base" if named else sif, post, more))
    assert (image / "etc" / "made").exists()
    assert "NAME=value" in (image / ".singularity.d" / "env" / "90-environment.sh").read_text()
    assert len(registry.list()) == 2, "the .sif is unpacked, and stays for the next"


@pytest.mark.apptainer
async def test_a_failing_post_section_is_reported(
    registry: Registry, base: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=r"test\.def: Apptainer made nothing: FATAL.*%post section"):
        await build(registry, definition(tmp_path, base, "ls /no/such/file"))
    assert registry.list() == []


@pytest.mark.apptainer
async def test_a_truncated_sif_is_reported(registry: Registry, sif: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.sif"
    cut.write_bytes(sif.read_bytes()[:200_000])
    with pytest.raises(UserError, match=r"cut\.sif: Apptainer made nothing: FATAL"):
        await build(registry, cut)


def dockerfile(folder: Path, base: Path, steps: str) -> Path:
    """A build's folder whose Dockerfile needs no registry."""
    shutil.copytree(base, folder / "build/base", symlinks=True)
    (folder / "build/Dockerfile").write_text(f"FROM scratch\nCOPY base /\n{steps}")
    return folder / "build"


needs_buildah = pytest.mark.skipif(
    not (shutil.which("buildah") or shutil.which("podman")), reason="neither buildah nor podman"
)


@needs_buildah
async def test_from_a_dockerfile(registry: Registry, base: Path, tmp_path: Path) -> None:
    steps = 'ENV NAME="two words"\nWORKDIR /app\nRUN echo $NAME > made\nUSER nobody\n'
    folder = dockerfile(tmp_path, base, steps)
    (folder / "base/.prorl-workdir").symlink_to("/etc/image-name")
    await build(registry, folder)
    image = tmp_path / "tree"
    merge(registry.stack(registry.find("made").digest)[::-1], image)
    assert (image / "app/made").read_text() == "two words\n"
    assert (image / ".prorl-workdir").read_text() == "/app\nnobody\n"
    assert (image / "etc/image-name").read_text() == "mine\n", "no link of the image is followed"
    script = (image / ".singularity.d/env/90-environment.sh").read_text()
    assert "export NAME='two words'\n" in script


@pytest.mark.apptainer
async def test_a_definition_may_name_a_pulled_image(
    registry: Registry, base: Path, tmp_path: Path
) -> None:
    blobs = Blobs()
    blobs.image("v1", packed(base), archive(Entry("etc/own", b"own")))
    Pull(registry, {}).pull("pulled", f"oci:{blobs.layout(tmp_path / 'oci')}:v1")
    recipe = tmp_path / "image.def"
    recipe.write_text("Bootstrap: localimage\nFrom: pulled\n")
    assert (await build(registry, recipe) / "etc/own").read_bytes() == b"own"


@needs_buildah
async def test_a_failing_step_of_a_dockerfile_is_reported(
    registry: Registry, base: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=r"Dockerfile: \w+ failed: .*ls /no/such/file"):
        await build(registry, dockerfile(tmp_path, base, "RUN ls /no/such/file\n"))
    assert registry.list() == []


async def test_without_buildah_a_dockerfile_is_refused(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "environment").mkdir()
    (tmp_path / "environment/Dockerfile").write_text("FROM a\n")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(StorageError, match=r"needs buildah or podman, .* apt-get install buildah"):
        await build(registry, tmp_path)
    with pytest.raises(SandboxError) as caught:
        await ImageCache(registry.root).locate(f"dockerfile:{tmp_path}")
    assert caught.value.code == "sandbox_start", "of this node, not of the task"


async def test_temporary_files_of_a_build_that_ends_early_are_removed(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A killed buildah leaves them; here a program in its place does."""
    (tmp_path / "Dockerfile").write_text("FROM a\n")
    builder = tmp_path / "bin/buildah"
    builder.parent.mkdir()
    builder.write_text(f"#!/bin/bash\necho $TMPDIR > {tmp_path}/where; > $TMPDIR/layer; kill -9 $$")
    builder.chmod(0o755)
    monkeypatch.setenv("PATH", f"{builder.parent}:{os.environ['PATH']}")
    with pytest.raises(UserError, match="buildah failed"):
        await build(registry, tmp_path)
    folder = Path((tmp_path / "where").read_text().strip())
    assert folder.is_relative_to(registry.root)
    assert not folder.exists()


@pytest.mark.parametrize("source", ["docker://debian", "/no/such/folder", "/etc/passwd"])
async def test_other_sources_are_refused(registry: Registry, source: str) -> None:
    with pytest.raises(
        UserError,
        match=r"image source .* expected a folder \(also a Dockerfile's\), .* or FILE.def",
    ):
        await build(registry, source)


async def test_a_folder_that_is_no_root_file_system_is_refused(
    registry: Registry, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="it has no bash"):
        await build(registry, tmp_path / "empty")
    assert list((registry.root / "work").iterdir()) == []


def test_without_spython_the_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "spython.main", None)
    with pytest.raises(
        StorageError, match="spython is not installed; install prorl's extra `apptainer`"
    ):
        client_class()


# ---- nothing hangs and nothing is left


@pytest.mark.apptainer
async def test_the_time_out_ends_everything(registry: Registry, base: Path, tmp_path: Path) -> None:
    mark = f"61.{os.getpid()}"
    making = asyncio.create_task(
        build(registry, definition(tmp_path, base, f"sleep {mark}"), timeout_s=4.0)
    )
    while not marked(mark) and not making.done():  # a busy machine may not come so far
        await asyncio.sleep(0.02)
    with pytest.raises(StorageError, match="not made within 4 s"):
        await making
    assert not marked(mark)
    registry.open()
    assert list((registry.root / "work").iterdir()) == []


@pytest.mark.apptainer
async def test_sigkill_in_the_middle_leaves_nothing(
    registry: Registry, base: Path, tmp_path: Path
) -> None:
    mark = f"62.{os.getpid()}"
    registry.open()
    made = definition(tmp_path, base, f"sleep {mark}")
    argv = [sys.executable, "-m", "prorl.cli", "image", "build", "made", "--from", str(made)]
    argv += ["--images", str(registry.root)]
    caller = await asyncio.create_subprocess_exec(*argv, stderr=asyncio.subprocess.DEVNULL)
    await until(lambda: marked(mark))
    caller.kill()
    await caller.wait()
    await until(lambda: not marked(mark))
    assert registry.list() == []


@pytest.mark.apptainer
def test_as_an_ordinary_user(base: Path, place: Path, tmp_path: Path) -> None:
    """Folder, then a definition on top of it; the %post section believes to be root."""
    home = place / "home"
    home.mkdir()
    home.chmod(0o777)
    made = definition(home, "base", "touch /etc/made && chown 33:33 /etc/made")
    prorl = [*small_image.as_ordinary_user(), sys.executable, "-m", "prorl.cli", "image"]
    environment = {"PATH": os.environ["PATH"], "HOME": str(home), "PYTHONDONTWRITEBYTECODE": "1"}
    for name, source in (("base", base), ("made", made)):
        argv = [*prorl, "build", name, "--from", str(source)]
        done = subprocess.run(
            argv,
            env=environment,
            cwd=home,
            capture_output=True,
            text=True,
            timeout=TIME_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr
    (image,) = (
        image
        for image in Registry(home / ".cache" / "prorl" / "images").list()
        if image.names == ("made",)
    )
    about = Path(image.path, "etc", "made").stat()
    assert about.st_uid != 0


@needs_buildah
async def test_a_tasks_dockerfile_is_built_once_for_each_digest_of_folder_and_settings(
    registry: Registry, base: Path, tmp_path: Path
) -> None:
    steps = "RUN echo run >> /counted\nRUN cat /etc/ca.pem > /seen; echo $NOTE >> /seen\n"
    folder = dockerfile(tmp_path, base, steps)
    adapted = (folder / "Dockerfile").read_text().replace("FROM scratch", "FROM base:1 AS first")
    (folder / "Dockerfile").write_text(adapted)
    (tmp_path / "ca.pem").write_text("certificate\n")
    settings = {
        "bases": {"base:1": "scratch"},
        "env": {"NOTE": "of the build"},
        "files": {str(tmp_path / "ca.pem"): "/etc/ca.pem"},
    }
    caches = [ImageCache(registry.root, build=settings) for _ in range(2)]  # of two daemons
    asks = [cache.locate(f"dockerfile:{folder}") for cache in (*caches, *caches)]
    stacks = await asyncio.gather(*asks)
    assert len(set(stacks)) == 1
    (name,) = registry.names()
    image = tmp_path / "tree"
    merge(stacks[0][::-1], image)
    assert (image / "seen").read_text() == "certificate\nof the build\n"
    assert (image / "counted").read_text() == "run\n"
    environment = (image / ".singularity.d/env/90-environment.sh").read_text()
    assert "NOTE" not in environment
    assert not (image / "etc/ca.pem").exists() or not (image / "etc/ca.pem").stat().st_size
    other = {**settings, "env": {"NOTE": "another"}}
    names = {name_of(folder, each) for each in (settings, other, {})}
    assert name in names
    registry.name("kept", registry.digest_of_name(name))
    await asyncio.gather(*(cache.close() for cache in caches))
    assert registry.collect(keep_bytes=0) == (), "an image with a name of its own stays"
    registry.forget("kept")
    assert len(registry.collect(keep_bytes=0)) > 1, "an image for tasks is built again"
    assert registry.names() == []
    (folder / "base/etc/image-name").write_text("changed\n")
    assert name_of(folder, settings) not in names
    assert len(names) == 3


async def test_a_heredoc_is_not_handed_to_a_builder_that_knows_none(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "Dockerfile").write_text("FROM a\nRUN cat <<END > /b\nrun\nEND\n")
    builder = tmp_path / "bin/buildah"
    builder.parent.mkdir()
    builder.write_text("#!/bin/bash\necho buildah version 1.28.2\n")
    builder.chmod(0o755)
    monkeypatch.setenv("PATH", f"{builder.parent}:{os.environ['PATH']}")
    cache = ImageCache(registry.root)
    with pytest.raises(SandboxError, match=r"<<\), which buildah 1\.28 does not know") as caught:
        await cache.locate(f"dockerfile:{tmp_path}")
    assert caught.value.code == "sandbox_start", "of this node, not of the task"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("from python:3 as a\r\nRUN x\r\n", "from base as a\r\nARG CA\nRUN x\r\n"),
        ("FROM --platform=linux/amd64 python:3\nFROM a", None),
        ("ARG V=3\nFROM python:${V} AS x\nFROM x", "ARG V=3\nFROM base AS x\nARG CA\nFROM x"),
        ("ARG B\nFROM ${B:-python:3}\n", "ARG B\nFROM base\nARG CA\n"),
        ("FROM a AS python:3\nCOPY --from=python:3 a b\n", "FROM a AS python:3\nARG CA\nCOPY"),
        ("FROM a\nCOPY --chown=b --from=python:3 a b\n", "COPY --chown=b --from=base a b\n"),
        (
            'FROM a\nRUN python -c "\\\nfrom python:3 \\\n# c\n\n FROM python:3"\n',
            "\nfrom python:3",
        ),
        ("FROM a\nRUN <<END cat\nFROM python:3\nEND\nFROM python:3", "END\nFROM base\nARG CA"),
        ("# escape=`\nFROM a\nRUN x `\nFROM python:3\n", "RUN x `\nFROM python:3\n"),
    ],
)
def test_base_images_have_another_name_where_an_instruction_names_them(
    text: str, expected: str | None
) -> None:
    adapted = adapt(text, {"bases": {"python:3": "base"}, "env": {"CA": "/c"}})
    assert (expected or text.replace("python:3", "base\nARG CA")) in adapted
    assert adapted.replace("\nARG CA", "").replace("base", "python:3").count("\n") == text.count(
        "\n"
    )


@needs_buildah
async def test_a_tasks_dockerfile_that_does_not_build_is_the_tasks_fault(
    registry: Registry, base: Path, tmp_path: Path
) -> None:
    folder = dockerfile(tmp_path, base, "RUN echo ERROR: no such package; false\n")
    cache = ImageCache(registry.root)
    with pytest.raises(SandboxError, match=r"ERROR: no such package|exit status 1") as caught:
        await cache.locate(f"dockerfile:{folder}")
    assert caught.value.code == "bad_task"
    with pytest.raises(SandboxError, match="no Dockerfile on this node"):
        await cache.locate(f"dockerfile:{tmp_path}")
    await cache.close()
