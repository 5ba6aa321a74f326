"""Tests of what a sandbox may do with its image: write over it within a quota, be root of it, and
nothing beyond; its environment and programs.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from prorl.errors import SandboxError
from prorl.linux.procfs import to_init
from prorl.sandbox.images.tree import digest_of
from prorl.types import FailureCode, SandboxSpec
from tests.sandbox import small_image
from tests.sandbox.conftest import IMAGE_KINDS, Sandboxd, short_folder

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.parametrize("kind", IMAGE_KINDS, indirect=True, scope="module"),
]
OVERLAY = 16 << 20


@pytest.fixture(scope="module")
def image() -> Iterator[Path]:
    with short_folder(0o755) as folder:
        image = small_image.make_image(folder)
        (image / "root").chmod(0o700)
        (image / "root" / "private").write_text("the owner's\n")
        (image / "root" / "private").chmod(0o600)
        (image / "usr" / "local" / "bin").mkdir(parents=True)
        own = image / "usr" / "local" / "bin" / "python3"
        own.write_text("#!/bin/sh\necho the image has its own\n")
        own.chmod(0o755)
        (image / ".singularity.d" / "env").mkdir(parents=True)
        (image / ".singularity.d" / "env" / "90-environment.sh").write_text(
            "export ASKED=yes\nexport PATH=/opt/tool/bin:$PATH\n"
        )
        yield image


@pytest.fixture
def daemon(sandboxd: Sandboxd) -> Sandboxd:
    return sandboxd


class CommandOutputs(dict[str, tuple[int | None, str]]):
    """Exit code and output by command."""

    uids: set[str]
    """Of the tool server, as the host sees them."""


async def ask(daemon: Sandboxd, spec: SandboxSpec, *commands: str) -> CommandOutputs:
    ref = await daemon.host.start("run/1/1", "run", spec)
    outputs = CommandOutputs()
    (started,) = (await daemon.host.status())["sandboxes"]
    status = Path(f"/proc/{to_init(started['pid'])[-1]}/status").read_text()
    outputs.uids = set(status.partition("Uid:")[2].splitlines()[0].split())
    async with daemon.host.connect(ref) as sandbox:
        for command in commands:
            done = await sandbox.call("bash", {"command": command}, 20.0)
            outputs[command] = done.exit_code, done.output
    await daemon.host.stop(ref)
    return outputs


async def test_an_overlay_takes_changes_and_the_image_stays(daemon: Sandboxd, image: Path) -> None:
    before = digest_of(str(image))
    spec = SandboxSpec(image=str(image), overlay_bytes=OVERLAY)
    outputs = await ask(
        daemon,
        spec,
        "echo mine > /etc/x; cat /etc/x",
        "rm /etc/image-name; ls /etc/image-name",
        "touch /usr/bin/new",
    )
    assert [code for code, _ in outputs.values()] == [0, 2, 0]
    assert (await ask(daemon, spec, "cat /etc/image-name; ls /etc/x")).popitem()[1] == (
        2,
        "mine\nls: cannot access '/etc/x': No such file or directory\n",
    )
    assert digest_of(str(image)) == before


async def test_an_overlay_has_a_quota(daemon: Sandboxd, image: Path) -> None:
    spec = SandboxSpec(image=str(image), overlay_bytes=OVERLAY)
    outputs = await ask(
        daemon,
        spec,
        "cat /dev/zero > /opt/a",
        "cat /dev/zero > /home/b",
        "ls -1s --block-size=1 /opt/a /home/b",
    )
    assert "No space left on device" in outputs["cat /dev/zero > /opt/a"][1]
    sizes = [
        int(line.split()[0])
        for line in outputs["ls -1s --block-size=1 /opt/a /home/b"][1].splitlines()
    ]
    assert OVERLAY * 0.9 < sum(sizes) <= OVERLAY


async def test_the_image_belongs_to_the_sandbox(daemon: Sandboxd, image: Path) -> None:
    """A sandbox can read files that only their owner may read: images are made by root, and the
    sandbox has a uid of its own.
    """
    assert await ask(daemon, SandboxSpec(image=str(image)), "cat /root/private") == {
        "cat /root/private": (0, "the owner's\n")
    }


async def test_the_images_environment_and_programs_come_first(
    daemon: Sandboxd, image: Path
) -> None:
    environment = ("echo $ASKED $PATH", "python3", "python -c 'print(6 * 7)'", "echo $HOME")
    outputs = await ask(daemon, SandboxSpec(image=str(image)), *environment)
    assert outputs["echo $ASKED $PATH"][1].startswith("yes /opt/tool/bin:")
    assert outputs["python3"] == (0, "the image has its own\n")
    assert outputs["python -c 'print(6 * 7)'"] == (0, "42\n"), "ours, where it has none"
    assert outputs["echo $HOME"] == (0, "/workspace\n")


@pytest.mark.parametrize("link", ["opt", "workspace"])
async def test_an_images_links_lead_nowhere_on_the_host(daemon: Sandboxd, link: str) -> None:
    """It runs with its link or not at all: nothing is made where the link would lead outside."""
    with short_folder(0o777) as folder:
        image, outside = small_image.make_image(folder), folder / "outside"
        outside.mkdir()
        outside.chmod(0o777)
        (image / link).rmdir() if (image / link).exists() else None
        (image / link).symlink_to(f"../../../../../..{outside}")
        spec = SandboxSpec(image=str(image), overlay_bytes=OVERLAY)
        with suppress(SandboxError):
            await ask(daemon, spec, f"touch {outside}/x /{link}/y")
        assert list(outside.iterdir()) == []


FORBIDDEN = (
    "ls /proc/1/fd/0",
    "cat /proc/1/environ",
    "kill -9 1; cat /no/such/file",
    "echo 1 > /proc/sys/vm/swappiness",
    "echo x > /proc/sys/kernel/core_pattern",
    "echo -1000 > /proc/self/oom_score_adj",
    "chown 33 /etc/passwd",
    "python -c 'import os; os.mknod(\"/etc/disk\", 0o060600, os.makedev(253, 0))'",
    "python -c 'import os; os.chroot(\"/etc\")'",
    "python -c 'import ctypes; exit(ctypes.CDLL(None).unshare(0x10000000) == -1)'",
    (
        'python -c \'import ctypes; exit(ctypes.CDLL(None).mount(b"none", b"/mnt", b"tmpfs", 0,'
        " None) == -1)'"
    ),
)


@pytest.mark.parametrize("config", ["ours", "the site's"])
async def test_root_of_the_image_is_no_root_of_the_machine(
    daemon: Sandboxd, image: Path, config: str
) -> None:
    if config == "the site's":  # as where Apptainer runs setuid
        (daemon.root / "support" / "apptainer.conf").unlink(missing_ok=True)
    spec = SandboxSpec(image=str(image), overlay_bytes=OVERLAY, fakeroot=True)
    outputs = await ask(
        daemon,
        spec,
        "id -u; touch /etc/x; ls -n /etc/x",
        "cat /proc/self/uid_map",
        "cat /proc/self/status",
        *FORBIDDEN,
    )
    code, output = outputs["id -u; touch /etc/x; ls -n /etc/x"]
    assert (code, output.splitlines()[0], output.split()[3:5]) == (0, "0", ["0", "0"])
    inside, _, count = outputs["cat /proc/self/uid_map"][1].split()
    assert (inside, count) == ("0", "1")
    assert outputs.uids.isdisjoint("0")
    assert confined(outputs) == 0xDB, "over files and ids, nothing else"


async def test_an_image_gives_no_power(daemon: Sandboxd, image: Path) -> None:
    for spec in (SandboxSpec(image=str(image)), SandboxSpec(image=str(image), overlay_bytes=1)):
        outputs = await ask(daemon, spec, "cat /proc/self/status", *FORBIDDEN)
        assert outputs.uids.isdisjoint("0")
        assert confined(outputs) == 0


def confined(outputs: CommandOutputs) -> int:
    """The capabilities of who tried in vain what is forbidden."""
    status = dict(
        line.split(":\t", 1)
        for line in outputs["cat /proc/self/status"][1].splitlines()
        if ":\t" in line
    )
    assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
    assert {command: outputs[command] for command in FORBIDDEN if outputs[command][0] == 0} == {}
    effective = int(status["CapEff"], 16)
    assert effective == int(status["CapPrm"], 16)
    assert not effective or effective == int(status["CapBnd"], 16)
    return effective


@pytest.mark.parametrize("spec", [SandboxSpec(overlay_bytes=1), SandboxSpec(fakeroot=True)])
async def test_without_an_image_there_is_nothing_to_write_over(
    daemon: Sandboxd, spec: SandboxSpec
) -> None:
    with pytest.raises(
        SandboxError, match="no image; expected kind apptainer or pyns and an image"
    ) as caught:
        await daemon.host.start("run/1/1", "run", spec)
    assert caught.value.code is FailureCode.BAD_TASK


PROGRAM = """
import asyncio, json, sys
import prorl.sandbox
from prorl.types import SandboxSpec

async def main():
    found = []
    for more in ({}, {"overlay_bytes": 1 << 24}, {"overlay_bytes": 1 << 24, "fakeroot": True}):
        spec = SandboxSpec(image=sys.argv[1], **more)
        async with prorl.sandbox.open(sys.argv[2], spec) as sandbox:
            command = "id -u; touch /etc/x && echo wrote; cat /root/private"
            done = await sandbox.exec(["bash", "-c", command], 20.0)
            found.append(done.output)
    print(json.dumps(found))

asyncio.run(main())
"""


async def test_as_an_ordinary_user(image: Path, kind: str) -> None:
    """Its own image, as `prorl image build` makes it for a user."""
    prefix = small_image.as_ordinary_user()
    with short_folder(0o777) as folder:
        copy = folder / "image"
        copying = [*prefix, "/bin/cp", "-r", "--preserve=mode,links", str(image), str(copy)]
        # /root stays behind: it may not be read
        await asyncio.to_thread(subprocess.run, copying, capture_output=True, check=False)
        (copy / "root").mkdir(exist_ok=True)
        (copy / "root" / "private").write_text("the owner's\n")
        environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(folder),
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        argv = [*prefix, sys.executable, "-c", PROGRAM, str(copy), kind]
        done = await asyncio.to_thread(
            subprocess.run,
            argv,
            env=environment,
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=60.0,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    plain, overlay, root = json.loads(done.stdout.splitlines()[-1])
    uid = plain.splitlines()[0]
    assert uid != "0"
    assert (overlay.splitlines()[:2], root.splitlines()[:2]) == ([uid, "wrote"], ["0", "wrote"])
    assert "wrote" not in plain


WORLD = {
    "pwd": "/workspace/data\n",
    "cat given.txt": "of the image\n",
    "echo $HOME $USER $SIDE": "/home/agent agent task\n",
    "cat /tmp/of-image /workspace/of-image /solution/of-image": "kept\nkept\nkept\n",
    "echo new > /tmp/n; echo new > /workspace/n; echo new > /solution/n; cat /tmp/n /workspace/n": (
        "new\nnew\n"
    ),
    "id -u": "0\n",
    "ulimit -f": "16384\n",
    "cd ~ && pwd": "/home/agent\n",
}
"""What a command prints in a sandbox whose `workdir` is the image's own."""


async def test_an_images_folders_and_variables_are_what_the_agent_sees(
    daemon: Sandboxd, image: Path
) -> None:
    for folder in ("workspace/data", "solution", "home/agent"):
        (image / folder).mkdir(parents=True, exist_ok=True)
    for folder in ("tmp", "workspace", "solution"):
        (image / folder / "of-image").write_text("kept\n")
    (image / "workspace/data/given.txt").write_text("of the image\n")
    (image / "etc/passwd").write_text("root:x:0:0::/root:/bin/bash\nagent:x:7:7::/home/agent:\n")
    (image / ".prorl-workdir").write_text("/workspace/data\nagent\n")
    spec = SandboxSpec(
        image=str(image),
        overlay_bytes=OVERLAY,
        file_bytes=OVERLAY,
        fakeroot=True,
        workdir="image",
        variables=("SIDE=task",),
    )
    seen = await ask(daemon, spec, *WORLD)
    assert {command: output for command, (_, output) in seen.items()} == WORLD
    assert (image / "workspace/of-image").read_text() == "kept\n"
    made = await ask(daemon, replace(spec, workdir="/srv/other"), "pwd", "ls -1 /workspace")
    assert made["pwd"] == (0, "/srv/other\n")
    assert made["ls -1 /workspace"] == (0, "data\nof-image\n")
