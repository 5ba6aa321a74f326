"""Makes sandboxes through the zygote and ends them without a trace; knows nothing of who uses them.

Life: socket, folder, groups and note are made -> the launcher starts -> its tool server says `ok` on a pipe -> ... -> the launcher
ends (we asked, or by itself) -> everything is removed. A sandbox is in `lives` from the first of these to the last.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import secrets
import signal
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from prorl.errors import SandboxError
from prorl.sandbox import janitor
from prorl.sandbox.cgroups import Cgroups
from prorl.sandbox.client import Fate
from prorl.sandbox.janitor import Note
from prorl.sandbox.kinds.apptainer import make_support
from prorl.sandbox.launch import Launch
from prorl.sandbox.live import Live, fate_of_exit
from prorl.sandbox.paths import check_socket_path, short_folder
from prorl.sandbox.settings import KINDS, Settings
from prorl.sandbox.trees import remove_tree
from prorl.sandbox.uids import Uids
from prorl.sandbox.zygote_client import Exit, ZygoteClient
from prorl.types import FailureCode, SandboxRef, SandboxSpec

BUNDLE = "prorl.tools.bundle"
"""Loaded by name, like the tool server itself."""
START_S = 30.0
STOP_S = 3.0
BACKLOG = 16
CLEAN_S = 5.0
"""How long the end waits for big folders to be removed; the next daemon in this root removes the rest."""
FOLDERS = ("live", "work", "trash")


class Maker:
    """Owns the zygote, uids, control groups and every living sandbox of one kind."""

    def __init__(self, kind: str, root: Path, node_id: str, settings: Settings, on_end: Callable[[Live, Fate], None]) -> None:
        self._kind, self._root, self._node_id = kind, root, node_id
        self._traits = KINDS[kind]
        self._settings = settings
        self._on_end = on_end
        self._support = root / "support"
        self._gate = asyncio.Semaphore(settings.parallel_starts)
        self._room = asyncio.Semaphore(settings.max_sandboxes)
        self._cleaners: set[asyncio.Task[None]] = set()
        self._closing = False
        self.lives: dict[str, Live] = {}
        self._ended = 0
        self._cpu_s = 0.0

    async def open(self) -> None:
        """Sweep what an earlier daemon left in this root, claim uids, start the zygote."""
        for folder in (self._root, *(self._root / name for name in FOLDERS)):
            folder.mkdir(mode=0o711, parents=True, exist_ok=True)
        await janitor.sweep(self._root)
        if self._traits.zipapp:
            self._support.mkdir(mode=0o755, exist_ok=True)
            importlib.import_module(BUNDLE).write(self._support / "server.pyz")
        if self._kind == "apptainer":
            make_support(str(self._support))
        self._sockets = short_folder(self._root)
        self._uids = Uids()
        self._cgroups = Cgroups(self._sockets.name) if self._settings.cgroups else Cgroups.none()
        self._start_zygote()

    def _start_zygote(self) -> None:
        self._zygote = ZygoteClient((self._kind,), self._on_started, self._on_exit, self._on_zygote_lost)
        self._zygote.start()

    @property
    def has_room(self) -> bool:
        """Whether another sandbox could start without waiting."""
        return not self._room.locked()

    def status(self) -> dict[str, Any]:
        """Counts and names."""
        return {
            "kind": self._kind,
            "live": len(self.lives),
            "ended": self._ended,
            "cpu_s": self._cpu_s,
            "cgroups": list(self._cgroups.enforced),
            "zygote_pid": self._zygote.pid,
            "sandboxes": [
                {"id": live.ref.sandbox_id, "owner": live.owner, "purpose": live.purpose, "pid": live.pid} for live in self.lives.values()
            ],
        }

    async def make(self, spec: SandboxSpec) -> Live:
        """Start one and wait until its tool server serves. Raises SandboxError."""
        self._check_image(spec.image)
        await self._room.acquire()
        try:
            async with self._gate:
                return await self._make(spec)
        except OSError as cause:
            self._room.release()
            raise SandboxError(FailureCode.SANDBOX_START, f"{self._kind}: {cause}") from cause
        except BaseException:
            self._room.release()
            raise

    def _check_image(self, image: str) -> None:
        if image and not self._traits.images:
            capable = " or ".join(kind for kind, traits in KINDS.items() if traits.images)
            raise SandboxError(FailureCode.BAD_TASK, f"image {image!r}: kind {self._kind} runs none; use {capable}")
        if image and not os.path.exists(image):
            raise SandboxError(FailureCode.BAD_TASK, f"image {image!r} does not exist on this node")

    async def _make(self, spec: SandboxSpec) -> Live:
        sandbox_id = secrets.token_hex(8)
        path = str(self._sockets / sandbox_id)
        check_socket_path(path)
        note, launch = self._prepare(sandbox_id, path, spec)
        live = Live(SandboxRef(self._node_id, sandbox_id, path), spec, note)
        self.lives[sandbox_id] = live
        janitor.write_note(self._root, note)
        status_read, status_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
                listener.bind(path)
                listener.listen(BACKLOG)
                self._zygote.launch(launch, listener, status_write)
            os.close(status_write)
            status_write = -1
            text = await self._first_words(status_read)
        except BaseException:
            self._abandon(live)
            raise
        finally:
            os.close(status_read)
            if status_write >= 0:
                os.close(status_write)
        if text != "ok":
            await self.end(live, FailureCode.SANDBOX_START, text)
            raise SandboxError(FailureCode.SANDBOX_START, f"{self._kind}: {text or 'the launcher died'}")
        live.ready = True
        return live

    def _prepare(self, sandbox_id: str, path: str, spec: SandboxSpec) -> tuple[Note, Launch]:
        uid = self._uids.take()
        folder = ""
        if self._traits.folder:
            folder = str(self._root / "work" / sandbox_id)
            os.mkdir(folder, 0o700)
            if uid >= 0:
                os.chown(folder, uid, uid)
        cgroups = self._cgroups.make(sandbox_id, spec.memory_bytes, spec.processes)
        note = Note(sandbox_id=sandbox_id, pid=0, start_ticks=0, uid=uid, socket=path, folder=folder, cgroups=cgroups)
        launch = Launch(
            sandbox_id=sandbox_id,
            kind=self._kind,
            uid=uid,
            image=spec.image,
            tools=spec.tools,
            memory_bytes=spec.memory_bytes,
            processes=spec.processes,
            file_bytes=spec.file_bytes,
            tmp_bytes=spec.tmp_bytes,
            workspace_bytes=spec.workspace_bytes,
            folder=folder,
            server=str(self._support / "server.pyz"),
            cgroups=cgroups,
        )
        return note, launch

    async def _first_words(self, fd: int) -> str:
        """What the launcher or the tool server says on the status pipe: `ok`, an error, or nothing when it dies."""
        loop = asyncio.get_running_loop()
        readable = asyncio.Event()
        loop.add_reader(fd, readable.set)
        try:
            async with asyncio.timeout(START_S):
                await readable.wait()
            return os.read(fd, 4096).decode("utf-8", "replace").removeprefix("error: ").strip()
        except TimeoutError:
            return f"not ready after {START_S:g} s"
        finally:
            loop.remove_reader(fd)

    # ---- ending

    async def end(self, live: Live, code: FailureCode, message: str) -> None:
        """TERM to the launcher, KILL if that does not do, then nothing is left. Idempotent."""
        if live.ending is None:
            live.ending = Fate(code, message)
            self._zygote.kill(live.ref.sandbox_id, signal.SIGTERM)
            try:
                async with asyncio.timeout(STOP_S):
                    await asyncio.shield(live.exited)
            except TimeoutError:
                self._zygote.kill(live.ref.sandbox_id, signal.SIGKILL)
        await live.ended.wait()

    def _abandon(self, live: Live) -> None:
        """The start was cancelled in the middle: end it in the background."""
        self._in_background(self.end(live, FailureCode.SANDBOX_START, "the start was given up"))

    def _on_started(self, sandbox_id: str, pid: int) -> None:
        live = self.lives.get(sandbox_id)
        if live is not None:
            live.pid = pid
            live.note = replace(live.note, pid=pid, start_ticks=janitor.start_ticks(pid))
            janitor.write_note(self._root, live.note)

    def _on_exit(self, sandbox_id: str, exit_: Exit) -> None:
        self._cpu_s += exit_.cpu_s
        live = self.lives.get(sandbox_id)
        if live is not None and not live.exited.done():
            live.exited.set_result(exit_)
            self._in_background(self._clean(live, exit_, orphaned=False))

    def _on_zygote_lost(self) -> None:
        """Its death has killed every launcher; nobody reaps for us, so each is watched to its end by its note."""
        lost = Exit(status=signal.SIGKILL, cpu_s=0.0)
        for live in list(self.lives.values()):
            if not live.exited.done():
                live.exited.set_result(lost)
                self._in_background(self._clean(live, lost, orphaned=True))
        if not self._closing:
            self._start_zygote()

    async def _clean(self, live: Live, exit_: Exit, orphaned: bool) -> None:
        fate = live.ending or fate_of_exit(exit_, self._traits, Cgroups.out_of_memory(live.note.cgroups))
        if orphaned or os.WIFSIGNALED(exit_.status):  # the guard did not see to the rest
            await janitor.end_processes(live.note)
        janitor.remove_remains(live.note, self._root / "trash")
        await janitor.remove_groups(live.note.cgroups)
        if live.note.folder:
            self._in_background(asyncio.to_thread(janitor.empty_trash, self._root / "trash", live.ref.sandbox_id))
        janitor.drop_note(self._root, live.ref.sandbox_id)
        del self.lives[live.ref.sandbox_id]
        self._uids.give(live.note.uid)
        if live.ready:
            self._room.release()
        self._ended += 1
        self._on_end(live, fate)
        live.ended.set()

    def _in_background(self, work: Any) -> None:
        task: asyncio.Task[None] = asyncio.create_task(work)
        self._cleaners.add(task)
        task.add_done_callback(self._cleaners.discard)

    async def close(self) -> None:
        """End every sandbox, then the zygote; idempotent."""
        self._closing = True
        lives = list(self.lives.values())
        await asyncio.gather(*(self.end(live, FailureCode.SANDBOX_LOST, "sandboxd stopped") for live in lives))
        if self._cleaners:
            await asyncio.wait(self._cleaners, timeout=CLEAN_S)
        self._zygote.close()
        self._uids.close()
        self._cgroups.close()
        remove_tree(str(self._support))
        for folder in (self._sockets, *(self._root / name for name in FOLDERS)):
            try:
                folder.rmdir()
            except OSError:
                pass  # not empty: the root is shared with something that we do not know
