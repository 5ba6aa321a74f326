"""Prepared workspaces: made once for siblings, whatever happens to whoever makes them, within a
budget of bytes.
"""

from __future__ import annotations

import asyncio
import hashlib
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast

import pytest

from prorl.errors import TaskError
from prorl.protocols import Sandbox
from prorl.sandbox.host import UnixSandboxHost
from prorl.sandbox.prepared import prepared
from prorl.types import SandboxSpec
from tests.sandbox.conftest import Sandboxd, end, start_daemon
from tests.waiting import until

SLOW = (
    "sleep 0.4; head -c16 /dev/urandom | base64 > token; mkdir -p src; echo 'print(1)' > src/a.py;"
    " chmod 755 src/a.py"
)


# ---- the rules, without a sandbox


class Tar:
    """Stands for a sandbox whose workspace has so many bytes."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes

    async def snapshot(self, path: str, max_bytes: int) -> int:
        size = self.num_bytes if self.num_bytes <= max_bytes else 0
        Path(path).write_bytes(bytes(size))
        return size

    async def restore(self, path: str) -> None:
        assert Path(path).stat().st_size == self.num_bytes


async def _is_copy(folder: Path, key: str, num_bytes: int, work_s: float = 0.02) -> bool:
    sandbox = cast("Sandbox", Tar(num_bytes))
    return await prepared(folder, 100, sandbox, key, lambda: asyncio.sleep(work_s))


async def test_the_least_recently_used_go_and_what_is_in_use_stays(tmp_path: Path) -> None:
    for key in ("a", "b"):
        assert not await _is_copy(tmp_path, key, 40)
    assert await _is_copy(tmp_path, "a", 40)
    assert not await _is_copy(tmp_path, "c", 40)
    assert [await _is_copy(tmp_path, key, 40) for key in ("a", "c", "b")] == [True, True, False]
    kept = [path for path in tmp_path.iterdir() if path.stat().st_size]
    assert len(kept) == 2


@pytest.mark.parametrize(("num_bytes", "work_s"), [(101, 0.02), (50, 0.0)])
async def test_what_is_not_worth_keeping_is_done_by_everybody(
    tmp_path: Path, num_bytes: int, work_s: float
) -> None:
    for _ in range(2):
        assert not await _is_copy(tmp_path, "key", num_bytes, work_s)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) == 0


# ---- through sandboxd


@pytest.fixture
async def daemon(folder: Path, sandbox_kind: str) -> AsyncIterator[Sandboxd]:
    started = await start_daemon(sandbox_kind, folder)
    yield started
    await end(started)
    assert not list(folder.glob("root/*/*"))


@asynccontextmanager
async def _fresh(host: UnixSandboxHost, number: int) -> AsyncIterator[Sandbox]:
    ref = await host.start(f"run/{number}/1", "run", SandboxSpec(tools=("bash",)))
    async with host.connect(ref) as sandbox:
        yield sandbox
    await host.stop(ref)


class Siblings:
    """Rollouts of one task; what each one's workspace held afterwards."""

    def __init__(self, host: UnixSandboxHost, command: str = "", key: str = "key") -> None:
        self._host, self._command, self._key = host, command, key
        self.num_works = 0
        self.failing = 0

    async def prepare(self, number: int) -> str:
        async with _fresh(self._host, number) as sandbox:

            async def work() -> None:
                self.num_works += 1
                if self._command:
                    await sandbox.exec(["bash", "-c", self._command], 20.0)
                if self.failing:
                    self.failing -= 1
                    raise TaskError("no setup")

            copied = await self._host.prepare(sandbox, self._key, work)
            result = await sandbox.exec(
                [
                    "bash",
                    "-c",
                    "cat token; python3 src/a.py; src/a.py 2>&1 | head -c 0; stat -c %a src/a.py",
                ],
                10.0,
            )
            return f"{'copied' if copied else 'worked'} {result.output}"


async def test_eight_siblings_prepare_once(daemon: Sandboxd) -> None:
    siblings = Siblings(daemon.host, SLOW)
    outputs = await asyncio.gather(*(siblings.prepare(number) for number in range(8)))
    assert siblings.num_works == 1
    assert sorted(text.split()[0] for text in outputs) == ["copied"] * 7 + ["worked"]
    # one random token: the work ran once, wherever it is looked at
    assert len({tuple(text.split()[1:]) for text in outputs}) == 1
    assert outputs[0].split()[2:] == ["1", "755"]


async def test_the_failure_of_the_first_is_its_own(daemon: Sandboxd) -> None:
    siblings = Siblings(daemon.host, SLOW)
    siblings.failing = 1
    outputs = await asyncio.gather(
        *(siblings.prepare(number) for number in range(4)), return_exceptions=True
    )
    assert sum(isinstance(text, TaskError) for text in outputs) == 1
    assert siblings.num_works == 2
    assert sorted(text.split()[0] for text in outputs if isinstance(text, str)) == [
        "copied",
        "copied",
        "worked",
    ]


async def test_quick_work_is_done_by_everybody(daemon: Sandboxd) -> None:
    siblings = Siblings(daemon.host)
    for number in range(3):
        assert (await siblings.prepare(number)).startswith("worked")
    assert siblings.num_works == 3


async def test_a_process_that_dies_leaves_its_claim_to_the_next(
    daemon: Sandboxd, folder: Path
) -> None:
    path = folder / "root/support/snapshots" / hashlib.sha256(b"key").hexdigest()
    code = (
        "import sys, time; from prorl.linux import locks\n"
        "locks.take(sys.argv[1]); print(flush=True); time.sleep(60)"
    )
    words = [sys.executable, "-c", code, str(path.with_suffix(".lock"))]
    maker = await asyncio.create_subprocess_exec(*words, stdout=asyncio.subprocess.PIPE)
    assert maker.stdout is not None
    await maker.stdout.readline()
    next_siblings = Siblings(daemon.host, SLOW)
    waiting = asyncio.create_task(next_siblings.prepare(1))
    await asyncio.sleep(0.5)
    assert next_siblings.num_works == 0
    maker.kill()
    await maker.wait()
    assert (await asyncio.wait_for(waiting, 60)).startswith("worked")


async def test_a_caller_that_gives_up_leaves_its_claim_to_the_next(daemon: Sandboxd) -> None:
    for number, leave in enumerate(("making", "waiting")):
        first = Siblings(daemon.host, "sleep 20", key=leave)
        maker = asyncio.create_task(first.prepare(100 + number))
        await until(lambda first=first: first.num_works)  # type: ignore[misc]
        next_siblings = Siblings(daemon.host, SLOW, key=leave)
        waiting = asyncio.create_task(next_siblings.prepare(number))
        await asyncio.sleep(0.5)
        assert next_siblings.num_works == 0
        if leave == "waiting":
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            waiting = asyncio.create_task(next_siblings.prepare(50))
        maker.cancel()
        assert (await asyncio.wait_for(waiting, 60)).startswith("worked")
        with pytest.raises(asyncio.CancelledError):
            await maker
