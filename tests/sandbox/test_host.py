"""sandboxd and its client, as INIT, RUN and EVAL use them."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from prorl.errors import SandboxError
from prorl.sandbox.host import UnixSandboxHost
from prorl.types import FailureCode, SandboxRef, SandboxSpec
from tests.sandbox.conftest import Sandboxd, until_live

SPEC = SandboxSpec()
pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_start_call_stop(sandboxd: Sandboxd) -> None:
    host = sandboxd.host
    ref = await host.start("run/1/1", "run", SPEC)
    assert len(ref.socket_path) < 100
    async with host.connect(ref) as sandbox:
        done = await sandbox.call("bash", {"command": "echo $((6*7)); exit 3"}, 60.0)
        assert done.exit_code == 3
        assert done.output.startswith("42\n")
        assert (await sandbox.exec(["id", "-u"], 60.0)).output.strip() not in ("", "0")
        assert (await sandbox.call("python", {"code": "x = 20\nx + 1"}, 60.0)).output == "21\n"
        assert (await sandbox.call("python", {"code": "x * 2"}, 60.0)).output == "40\n"
    await host.stop(ref)
    await host.stop(ref)
    assert not os.path.exists(ref.socket_path)
    assert (await host.status())["live"] == 0


async def test_a_request_that_sandboxd_cannot_carry_out_is_answered(sandboxd: Sandboxd) -> None:
    """Whatever went wrong inside: who asks must never wait for its time-out."""
    for ask in (
        {"op": "start", "owner": "run/1/1"},
        {"op": "juggle"},
        {"op": "reserve", "owner": "a", "purpose": "run", "spec": 3},
    ):
        with pytest.raises(SandboxError, match="sandboxd: ") as refused:
            await sandboxd.host._ask(ask, 60.0)
        assert refused.value.code is FailureCode.SANDBOX_START


async def test_python3_is_on_the_path_and_whole(sandboxd: Sandboxd) -> None:
    ref = await sandboxd.host.start("run/1/1", "run", SPEC)
    async with sandboxd.host.connect(ref) as sandbox:
        done = await sandbox.exec(
            ["python3", "-c", "import json, decimal, sqlite3, ssl; print('all here')"], 20.0
        )
    assert (done.exit_code, done.output) == (0, "all here\n")


async def test_files_cross_both_ways(sandboxd: Sandboxd) -> None:
    ref = await sandboxd.host.start("run/1/1", "run", SPEC)
    content = os.urandom(3 << 20)
    async with sandboxd.host.connect(ref) as sandbox:
        await sandbox.put("a/b/c.bin", content, 0o755)
        assert await sandbox.get("a/b/c.bin", 4 << 20) == content
        assert (
            await sandbox.exec(["stat", "-c", "%a %s", "a/b/c.bin"], 60.0)
        ).output == f"755 {len(content)}\n"
        assert (await sandbox.exec(["sha256sum", "-"], 5.0, stdin=b"abc")).output.startswith(
            "ba7816bf"
        )
        with pytest.raises(FileNotFoundError):
            await sandbox.get("nothing")
        with pytest.raises(SandboxError):
            await sandbox.get("a/b/c.bin", 100)


@pytest.mark.parametrize("path", ["../x", "/etc/passwd", "a/../../x", "", "a\0b"])
async def test_paths_stay_below_the_workspace(sandboxd: Sandboxd, path: str) -> None:
    ref = await sandboxd.host.start("run/1/1", "run", SPEC)
    async with sandboxd.host.connect(ref) as sandbox:
        with pytest.raises(SandboxError):
            await sandbox.get(path)
        with pytest.raises(SandboxError):
            await sandbox.put(path, b"x")


async def test_links_of_the_agent_are_not_followed(sandboxd: Sandboxd) -> None:
    ref = await sandboxd.host.start("run/1/1", "run", SPEC)
    async with sandboxd.host.connect(ref) as sandbox:
        await sandbox.call(
            "bash", {"command": "ln -s /etc/passwd p; ln -s / root; mkfifo pipe; mkdir d"}, 5.0
        )
        for path in ("p", "root/etc/passwd", "pipe", "d"):
            with pytest.raises(SandboxError):
                await sandbox.get(path)
        with pytest.raises(SandboxError):
            await sandbox.put("root/tmp/x", b"x")
        await sandbox.put("p", b"a file of our own")  # replaces the link, does not write through it
        assert await sandbox.get("p") == b"a file of our own"


async def test_bad_calls_are_results_that_the_policy_can_read(sandboxd: Sandboxd) -> None:
    ref = await sandboxd.host.start("run/1/1", "run", SPEC)
    async with sandboxd.host.connect(ref) as sandbox:
        for tool, arguments in (
            ("nothing", {}),
            ("bash", {}),
            ("bash", {"command": 3}),
            ("python", {}),
            ("files", {}),
        ):
            done = await sandbox.call(tool, arguments, 60.0)
            assert done.exit_code in (1, 2)
            assert done.output
        assert (await sandbox.exec(["no-such-program"], 60.0)).exit_code == 127


async def test_a_reservation_is_used_up_by_its_start(sandboxd: Sandboxd) -> None:
    host = sandboxd.host
    await host.reserve("run/1/1", "eval", SPEC)
    await host.reserve("run/1/1", "eval", SPEC)
    first = await host.start("run/1/1", "eval", SPEC)
    assert (await host.status())["live"] == 1
    assert [entry["id"] for entry in (await host.status())["sandboxes"]] == [first.sandbox_id]
    assert (await host.start("run/1/1", "eval", SPEC)).sandbox_id != first.sandbox_id


async def test_stop_owner_ends_all_of_an_attempt_and_nothing_else(sandboxd: Sandboxd) -> None:
    host = sandboxd.host
    await host.start("run/1/1", "run", SPEC)
    await host.reserve("run/1/1", "eval", SPEC)
    other = await host.start("run/2/1", "run", SPEC)
    await host.stop_owner("run/1/1")
    await until_live(host, 1)
    assert [entry["id"] for entry in (await host.status())["sandboxes"]] == [other.sandbox_id]


async def test_a_newer_attempt_ends_the_sandboxes_of_an_older_attempt(sandboxd: Sandboxd) -> None:
    host = sandboxd.host
    await host.start("run/1/1", "run", SPEC)
    newer = await host.start("run/1/2", "run", SPEC)
    await until_live(host, 1)
    assert [entry["id"] for entry in (await host.status())["sandboxes"]] == [newer.sandbox_id]


async def test_wall_time_ends_a_sandbox_and_blames_the_policy(sandboxd: Sandboxd) -> None:
    ref = await sandboxd.host.start("run/1/1", "run", SandboxSpec(wall_s=0.3))
    async with sandboxd.host.connect(ref) as sandbox:
        with pytest.raises(SandboxError) as caught:
            await sandbox.call("bash", {"command": "sleep 20"}, 30.0)
    assert caught.value.code is FailureCode.SANDBOX_BROKEN
    assert "wall time" in caught.value.message


async def test_a_missing_daemon_is_a_single_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prorl.sandbox.host.PATIENCE_S", 0.1)
    host = UnixSandboxHost("/tmp/prorl-no-such-socket")
    with pytest.raises(SandboxError, match="no sandboxd at"):
        await host.start("run/1/1", "run", SPEC)
    with pytest.raises(SandboxError) as caught:
        async with host.connect(SandboxRef("local", "x", "/tmp/prorl-no-such-socket")):
            pass
    assert caught.value.code is FailureCode.SANDBOX_LOST


async def test_a_snapshot_prepares_a_sibling(sandboxd: Sandboxd, tmp_path: Path) -> None:
    host, path = sandboxd.host, str(tmp_path / "snapshot")
    fill = (
        "mkdir -p a/b; head -c 3000000 /dev/urandom > a/b/big; echo h > .hidden; ln -s b a/link;"
        " ln -s /no/such nowhere; touch $'a b\\n c'; echo '#!' > run; chmod 750 run; ln run same"
    )
    look = "find . -printf '%p %y %m %l %s\\n' | sort; sha256sum a/link/big; stat -c %h run"
    seen = []
    for number in range(2):
        ref = await host.start(f"run/{number}/1", "run", SPEC)
        async with host.connect(ref) as sandbox:
            if number == 0:
                assert (await sandbox.exec(["bash", "-c", fill], 10.0)).exit_code == 0
                assert await sandbox.snapshot(path, 64 << 20) > 3_000_000
                assert await sandbox.snapshot(str(tmp_path / "small"), 1 << 20) == 0
            else:
                await sandbox.restore(path)
            seen.append((await sandbox.exec(["bash", "-c", look], 10.0)).output)
            (tmp_path / "junk").write_bytes(b"no archive")
            with pytest.raises(SandboxError, match="no snapshot"):
                await sandbox.restore(str(tmp_path / "junk"))
    assert seen[0] == seen[1]
    assert "./run f 750  3" in seen[0]


async def test_a_sandbox_of_another_node_is_refused(sandboxd: Sandboxd) -> None:
    """Its socket would open where nodes share a file system, and nobody would ever end it."""
    host = UnixSandboxHost(str(sandboxd.root.parent / "sd"), "n1")
    ref = SandboxRef("n2", "s1", "/tmp/s1.sock")
    with pytest.raises(SandboxError, match="is on node 'n2', this is 'n1'") as caught:
        host.connect(ref)
    assert caught.value.code is FailureCode.STAGE_ERROR
    with pytest.raises(SandboxError, match="is on node 'n2'"):
        await host.stop(ref)


async def test_the_next_incarnation_of_a_process_keeps_what_it_names_and_ends_the_rest(
    sandboxd: Sandboxd,
) -> None:
    path = str(sandboxd.root.parent / "sd")
    first, other = (UnixSandboxHost(path, holder=name) for name in ("worker-0", "worker-1"))
    kept = await first.start("run/1/1", "run", SPEC)
    await first.start("run/1/1", "eval", SPEC)  # its grading begins anew
    await first.reserve("run/1/1", "eval", SPEC)
    await first.start("run/2/1", "run", SPEC)
    await first.reserve("run/2/1", "eval", SPEC)
    theirs = await other.start("run/3/1", "run", SPEC)
    await until_live(first, 6)
    await first.close()
    later = UnixSandboxHost(path, holder="worker-0")
    mine = await later.start("run/4/1", "run", SPEC)
    await later.keep({"run/1/1": kept.sandbox_id})
    await until_live(later, 4)
    reserved = await later.start("run/1/1", "eval", SPEC)
    living = {entry["id"] for entry in (await later.status())["sandboxes"]}
    assert living == {ref.sandbox_id for ref in (kept, theirs, mine, reserved)}
    await later.keep({})  # as after the gateway has been away: all of these are its own by now
    await until_live(later, 4)
    await asyncio.gather(later.close(), other.close())
