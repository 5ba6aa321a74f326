"""Tests of what hostile code leaves behind: processes, files, traps for whoever clears up.

Nothing of it stays. In every kind.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from prorl.errors import SandboxError
from prorl.linux import procfs
from prorl.types import FailureCode
from tests.faults.leftovers import marked
from tests.security.box import SPEC, Box, need_own_uid, need_walls

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_daemons_end_with_the_sandbox(box: Box) -> None:
    mark = f"60.{os.getpid()}{len(box.kind)}"
    await box.sh(
        f"setsid nohup sleep {mark} >/dev/null 2>&1 & setsid bash -c '(sleep {mark} &)' & sleep 0.3"
    )
    assert len(marked(mark)) >= 2
    await box.daemon.host.stop(box.ref)
    assert not marked(mark)


@pytest.mark.skipif(os.getuid() != 0, reason="without root all of local has one uid, and says so")
async def test_the_next_sandbox_of_a_uid_inherits_no_files_and_no_system_v_objects(
    box: Box,
) -> None:
    need_own_uid(box)
    mark = f"prorl-left-{os.getpid()}-{box.kind}"
    code = (
        "import ctypes, os\nl = ctypes.CDLL(None)\n"
        "print(l.shmget(0, 4096, 0o1600) >= 0, l.msgget(0, 0o1600) >= 0,"
        " l.semget(0, 1, 0o1600) >= 0)"
    )
    folders = "/tmp /var/tmp /dev/shm"
    made = f"for f in {folders}; do mkdir -p $f/{mark}/d; echo x > $f/{mark}/d/x; done; id -u"
    code_of, output = await box.sh(made)
    assert (await box.py(code))[1] == "True True True\n"
    uid = int(output)
    await box.daemon.host.stop(box.ref)
    assert not [folder for folder in folders.split() if os.path.lexists(f"{folder}/{mark}")]
    leftovers = [
        sysv_object
        for sysv_object in procfs.sysv_objects()
        if uid in (sysv_object.uid, sysv_object.creator)
    ]
    assert code_of == 0
    assert not leftovers


async def test_a_fork_storm_does_not_outrun_stop(box: Box) -> None:
    mark = f"0.5{os.getpid()}{len(box.kind)}"
    storm = f"while :; do (sleep {mark} & sleep {mark} & sleep {mark}) & done"
    running = asyncio.create_task(box.sandbox.call("bash", {"command": storm}, 30.0))
    await asyncio.sleep(0.5)
    await box.daemon.host.stop(box.ref)
    with pytest.raises(SandboxError) as caught:
        await running
    assert caught.value.code is FailureCode.SANDBOX_LOST, "we stopped it"
    assert not marked(mark)


async def test_a_tree_of_any_depth_and_name_is_removed(box: Box) -> None:
    await box.py(
        "import os\nopen('new\\nline', 'w'); open(b'\\xff\\xfe', 'w'); os.symlink('/', 'root');"
        " os.mkfifo('pipe')\nos.mkdir('locked'); open('locked/x', 'w'); os.chmod('locked', 0)\nfor"
        " i in range(1500): os.mkdir('d'); os.chdir('d')"
    )
    await box.daemon.host.stop(box.ref)
    assert list((box.daemon.root / "work").iterdir()) == []
    assert list((box.daemon.root / "live").iterdir()) == []


async def test_two_sandboxes_of_the_same_name_are_distinct(box: Box) -> None:
    host = box.daemon.host
    refs = [await host.start("run/7/1", "run", SPEC) for _ in range(2)]
    assert len({ref.sandbox_id for ref in refs}) == len({ref.socket_path for ref in refs}) == 2
    for number, ref in enumerate(refs):
        async with host.connect(ref) as sandbox:
            await sandbox.put("name", str(number).encode())
    for number, ref in enumerate(refs):
        async with host.connect(ref) as sandbox:
            assert await sandbox.get("name") == str(number).encode()
    await host.stop_owner("run/7/1")
    assert (await host.status())["live"] == 1


async def test_a_hostile_workspace_as_a_snapshot(box: Box, tmp_path: Path) -> None:
    """Links out of the workspace, devices, strange names and modes: the sibling gets them as they
    are, the host's files stay.
    """
    trap = (
        "mkdir d; ln -s / root; ln -s ../../../../../etc/passwd p; ln -s d loop; ln -s ../loop"
        " d/loop; mkfifo pipe; printf x > $'new\nline'; printf x > ' -rf'; printf x > $'\\xff'; cp"
        " /bin/true suid; chmod 4755 suid; truncate -s 50M sparse; printf one > a; ln a b"
    )
    assert (await box.sh(trap))[0] == 0
    snapshot = str(tmp_path / "snapshot")
    assert await box.sandbox.snapshot(snapshot, 96 << 20) > 0
    async with box.neighbour() as sibling:
        await sibling.restore(snapshot)
        listing = (
            await sibling.exec(
                ["bash", "-c", "readlink root p; stat -c '%F %s' pipe sparse; ls | wc -l"], 10.0
            )
        ).output
        assert listing.split("\n")[:4] == [
            "/",
            "../../../../../etc/passwd",
            "fifo 0",
            "regular file 52428800",
        ]
        for name in ("root/etc/passwd", "p", "pipe", "loop/loop"):
            with pytest.raises(SandboxError):
                await sibling.get(name)


EVIL_TAR = (
    "import io, tarfile\ndef add(name, kind=tarfile.REGTYPE, link='', data=b'evil'):\n  member ="
    " tarfile.TarInfo(name); member.type = kind; member.linkname = link; member.mode = 0o7777\n "
    " member.size = len(data) if kind == tarfile.REGTYPE else 0\n  tar.addfile(member,"
    " io.BytesIO(data))\ntar = tarfile.open('evil.tar', 'w')\nadd('/tmp/prorl-evil-{mark}');"
    " add('../../../../../tmp/prorl-evil-{mark}'); add('out', tarfile.SYMTYPE,"
    " '/tmp')\nadd('out/prorl-evil-{mark}'); add('hard', tarfile.LNKTYPE, '/etc/shadow');"
    " add('disk', tarfile.BLKTYPE)\ntar.close()"
)


async def test_an_archive_that_points_outside(box: Box, tmp_path: Path) -> None:
    """Unpacked inside with the agent's own rights, whatever it says: the host has nothing of it."""
    need_walls(box)
    mark = f"{os.getpid()}"
    await box.py(EVIL_TAR.replace("{mark}", mark))
    evil = tmp_path / "evil.tar"
    evil.write_bytes(await box.sandbox.get("evil.tar"))
    async with box.neighbour() as sibling:
        with pytest.raises(SandboxError) as caught:
            await sibling.restore(str(evil))
        assert caught.value.code is FailureCode.SANDBOX_BROKEN
        assert (await sibling.exec(["bash", "-c", "cat hard disk"], 10.0)).exit_code != 0
    assert not os.path.exists(f"/tmp/prorl-evil-{mark}")


async def test_a_patch_that_points_outside(box: Box) -> None:
    """`../` and links in a patch, and a hard link to a file of the host: inside only, or not at
    all.
    """
    need_walls(box)
    mark = f"prorl-evil-{os.getpid()}"
    patch = f"--- a/../../../tmp/{mark}\n+++ b/../../../tmp/{mark}\n@@ -0,0 +1 @@\n+evil\n"
    await box.sandbox.put("p.diff", patch.encode())
    await box.sh(
        "git init -q . ; git apply p.diff; patch -p1 < p.diff; ln /etc/shadow h; ln -s /etc e; echo"
        " x > e/shadow"
    )
    assert not os.path.exists(f"/tmp/{mark}")
    assert (await box.sh("cat h e/shadow"))[0] != 0
