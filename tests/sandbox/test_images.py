"""Images for the kinds that run them: a folder and a .sif, made here without any registry."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from prorl.errors import SandboxError
from prorl.sandbox.kinds.apptainer import make_support, program
from prorl.types import FailureCode, SandboxSpec
from tests.sandbox.conftest import end, start_daemon, why_not


def make_image(folder: Path) -> Path:
    """A small root file system: bash and its libraries from this machine, and a file that only the image has."""
    make_support(str(folder / "support"))
    image = folder / "image"
    shutil.copytree(folder / "support" / "skeleton", image, symlinks=True)
    (image / "etc" / "image-name").write_text("mine\n")
    for name in ("bash", "cat", "ls", "id"):
        path = shutil.which(name)
        assert path is not None
        libraries = [word for word in subprocess.check_output(["ldd", path], text=True).split() if word.startswith("/")]
        for source in (os.path.realpath(path), *libraries):
            target = image / ("usr" + source.removeprefix("/usr") if not source.startswith("/usr") else source[1:])
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target)
    for library in Path("/usr/lib").glob(f"{os.uname().machine}-linux-gnu/lib[cmz].so*"):
        shutil.copy(library, image / str(library)[1:])
    return image


@pytest.mark.parametrize("form", ["folder", "sif"])
@pytest.mark.apptainer
async def test_apptainer_runs_it(folder: Path, form: str) -> None:
    if why_not("apptainer"):
        pytest.skip(why_not("apptainer"))
    image = make_image(folder)
    if form == "sif":
        if not os.access("/dev/fuse", os.W_OK):
            pytest.skip("/dev/fuse is missing: .sif images cannot be mounted")
        environment = {"PATH": os.environ["PATH"], "HOME": str(folder), "APPTAINER_CONFIGDIR": str(folder / "state")}
        argv = [program(), "-s", "build", str(folder / "image.sif"), str(image)]
        subprocess.run(argv, check=True, env=environment, capture_output=True)
        image = folder / "image.sif"
    daemon = await start_daemon("apptainer", folder)
    ref = await daemon.host.start("run/1/1", "run", SandboxSpec(image=str(image)))
    async with daemon.host.connect(ref) as sandbox:
        done = await sandbox.call("bash", {"command": "cat /etc/image-name; ls /usr/share/doc 2>/dev/null | wc -l; touch /etc/x"}, 10.0)
        assert done.output.startswith("mine\n")
        assert done.exit_code != 0, "the image is read-only"
        assert (await sandbox.call("python", {"code": "6 * 7"}, 10.0)).output == "42\n"
    await end(daemon)


async def test_bwrap_runs_a_folder(folder: Path) -> None:
    if why_not("bwrap"):
        pytest.skip(why_not("bwrap"))
    image = make_image(folder)
    daemon = await start_daemon("bwrap", folder)
    ref = await daemon.host.start("run/1/1", "run", SandboxSpec(image=str(image)))
    async with daemon.host.connect(ref) as sandbox:
        assert (await sandbox.call("bash", {"command": "cat /etc/image-name"}, 10.0)).output == "mine\n"
    await end(daemon)


@pytest.mark.parametrize(("kind", "image"), [("pyns", "/tmp"), ("bwrap", "/no/such/image")])
async def test_an_image_that_cannot_be_run_is_the_tasks_fault(folder: Path, kind: str, image: str) -> None:
    if why_not(kind):
        pytest.skip(why_not(kind))
    daemon = await start_daemon(kind, folder)
    with pytest.raises(SandboxError) as caught:
        await daemon.host.start("run/1/1", "run", SandboxSpec(image=image))
    assert caught.value.code is FailureCode.BAD_TASK
    assert image in caught.value.message
    await end(daemon)
