"""Tests that whoever opens next sweeps the leftovers of dead sandboxds, and nothing of living
ones.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from prorl.errors import ConfigError, SandboxError
from prorl.sandbox.node import janitor, paths
from prorl.sandbox.node.janitor import Note
from prorl.sandbox.node.maker import Maker
from prorl.sandbox.node.paths import SocketFolder, base_folder, claim, orphans
from prorl.sandbox.node.settings import Settings
from prorl.sandbox.node.uids import Uids, living_uids
from prorl.types import SandboxSpec
from tests.sandbox.conftest import end, start_daemon
from tests.waiting import until


@contextmanager
def claimed_by_another(root: Path, code: str = "") -> Iterator[subprocess.Popen[bytes]]:
    """A process that claims this root, then runs `code`, and waits to be killed."""
    script = (
        "import asyncio, sys, pathlib, time\nfrom prorl.sandbox.node.paths import claim\nroot ="
        f" pathlib.Path({str(root)!r})\n"
    )
    script += (
        f"folder = asyncio.run(claim(root))\n{code}\nprint('ready', flush=True)\ntime.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == b"ready\n"
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def _has_network_namespaces() -> bool:
    return subprocess.run(["unshare", "--net", "true"], capture_output=True).returncode == 0


def orphan_of(mine: SocketFolder, root: Path) -> SocketFolder | None:
    """This root's folder if its owner is dead; others are left as they are."""
    orphan = None
    for folder in orphans(mine):
        if folder.root == root:
            orphan = folder
        else:
            folder.release()
    return orphan


async def test_a_folder_is_an_orphan_from_the_death_of_its_owner_on(folder: Path) -> None:
    mine = await claim(folder / "mine")
    with claimed_by_another(folder / "other") as other:
        assert orphan_of(mine, folder / "other") is None
        other.kill()
        other.wait()
        orphan = orphan_of(mine, folder / "other")
        assert orphan is not None
        assert orphan.path.is_dir()
        orphan.remove()
        assert not orphan.path.exists()
    mine.remove()
    assert not mine.path.exists()


async def test_a_second_sandboxd_on_a_root_is_refused_in_a_single_line(folder: Path) -> None:
    with claimed_by_another(folder), pytest.raises(ConfigError, match="another sandboxd works in"):
        await claim(folder)


async def test_an_owner_waits_for_who_sweeps_its_folder(folder: Path) -> None:
    mine = await claim(folder / "mine")
    with claimed_by_another(folder / "other") as other:
        other.kill()
        other.wait()
    swept = orphan_of(mine, folder / "other")
    assert swept is not None
    waiting = asyncio.create_task(claim(folder / "other"))
    await asyncio.sleep(paths.RETRY_S * 4)
    assert not waiting.done()
    swept.remove()
    other_again = await waiting
    assert other_again.path.is_dir()
    other_again.remove()
    mine.remove()


@pytest.mark.parametrize("how", ["its root is gone", "its root is there"])
async def test_a_killed_sandboxd_that_nobody_opens_again(kind: str, folder: Path, how: str) -> None:
    (folder / "first").mkdir(mode=0o711)
    first = await start_daemon(kind, folder / "first")
    ref = await first.host.start("run/1/1", "run", SandboxSpec())
    async with first.host.connect(ref) as sandbox:
        await sandbox.put("made/by/an/agent", b"x")
    first.process.kill()
    await first.process.wait()
    await first.host.close()
    sockets = Path(ref.socket_path).parent
    assert sockets.is_dir()
    if how == "its root is gone":
        shutil.rmtree(folder / "first")
    (folder / "second").mkdir(mode=0o711)
    second = await start_daemon(kind, folder / "second")
    await until(lambda: not sockets.exists())
    assert not (folder / "first" / "root").exists()
    assert not list(Path("/sys/fs/cgroup").glob(f"*/prorl-{sockets.name}"))
    await end(second)
    assert not list(base_folder().glob(f"{sockets.name}*"))


async def test_a_start_that_fails_before_the_launch_leaves_nothing(folder: Path) -> None:
    maker = Maker("local", folder, "node", Settings(), lambda *_: None)
    await maker.open()
    try:
        shutil.rmtree(maker._sockets.path)
        for _ in range(3):
            with pytest.raises(SandboxError, match="No such file"):
                await maker.make(SandboxSpec())
        assert not maker.sandboxes
        assert not list((folder / "live").iterdir())
        assert maker.has_room
        maker._sockets.path.mkdir(mode=0o700)
        live = await maker.make(SandboxSpec())
        assert live.ready
    finally:
        await asyncio.wait_for(maker.close(), 60)


@pytest.mark.skipif(os.getuid() != 0, reason="only root has uids to give")
async def test_uids_are_ended_by_who_claims_them_and_by_nobody_else(folder: Path) -> None:
    first, second = Uids(), Uids()
    uid = second.take()
    living = subprocess.Popen(["sleep", "60"], user=uid)
    (folder / "live").mkdir()
    (folder / "work").mkdir()
    (folder / "trash").mkdir()
    note = Note(sandbox_id="a", pid=0, start_ticks=None, uid=uid, socket="", folder="", cgroups=())
    try:
        janitor.write_note(folder, note)  # of a daemon that is dead; its uid has a new owner
        assert await janitor.sweep(folder, first) == 1
        assert living.poll() is None
        second.close()
        janitor.write_note(folder, note)
        assert await janitor.sweep(folder, first) == 1
        assert living.wait(5) == -9
        living = subprocess.Popen(["sleep", "60"], user=uid)
        third = Uids()  # takes the block that is free again
        assert living.wait(5) == -9
        assert uid not in living_uids().values()
        assert third.take() != uid, "not before it is known to be free"
        third.close()
    finally:
        living.kill()
        living.wait()
        first.close()


@pytest.mark.skipif(os.getuid() != 0, reason="only root has uids to give")
@pytest.mark.skipif(not _has_network_namespaces(), reason="no network namespaces here")
def test_no_two_network_namespaces_share_a_block(folder: Path) -> None:
    """A node in a namespace of its own would otherwise end the sandboxes of its neighbours."""
    mine = Uids()
    uid = mine.take()
    living = subprocess.Popen(["sleep", "60"], user=uid)
    program = "from prorl.sandbox.node.uids import Uids\nuids = Uids()\n"
    program += f"with uids.holding_dead_block({uid}) as dead: print(dead, {uid} in uids.block)"
    try:
        argv = ["unshare", "--net", sys.executable, "-c", program]
        theirs = subprocess.run(argv, check=True, capture_output=True, text=True).stdout
        assert theirs.split() == ["False", "False"]
        assert living.poll() is None
    finally:
        living.kill()
        living.wait()
        mine.close()


async def test_notes_that_a_crash_of_the_machine_cut_are_dropped(folder: Path) -> None:
    for name in ("live", "work", "trash"):
        (folder / name).mkdir()
    for name, text in {
        "a": "",
        "b": '{"sandbox_id"',
        "c": '{"sandbox_id": "c"}',
        "d.tmp": "",
    }.items():
        (folder / "live" / name).write_text(text)
    (folder / "work" / "a").mkdir()
    uids = Uids()
    assert await janitor.sweep(folder, uids) == 0
    uids.close()
    assert list((folder / "live").iterdir()) == list((folder / "work").iterdir()) == []
    assert [path.name for path in (folder / "trash").iterdir()] == ["a"]
