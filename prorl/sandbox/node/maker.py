"""Makes sandboxes through the zygote and ends them without a trace; knows nothing of who uses them.

Life cycle: socket, folder, groups and note are made -> the launcher starts -> its tool server says
`ok` on a pipe -> ... -> the launcher ends (we asked, or by itself) -> everything is removed. A
sandbox is in `sandboxes` from the first of these to the last.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from prorl.errors import SandboxError
from prorl.linux import memory
from prorl.linux.procfs import is_stopped, start_ticks, to_init
from prorl.network_policy import NO_NETWORK, NetworkPolicy
from prorl.sandbox import kinds
from prorl.sandbox.blame import Cause, Fate, fate_of, fate_of_exit
from prorl.sandbox.kind import room, short_of_terminals
from prorl.sandbox.launch.spec import Launch
from prorl.sandbox.launch.zygote_client import Exit, ZygoteClient, read_status
from prorl.sandbox.node import cgroups, janitor
from prorl.sandbox.node.cgroups import Cgroups
from prorl.sandbox.node.janitor import Note
from prorl.sandbox.node.live import LiveSandbox
from prorl.sandbox.node.paths import check_socket_path, claim
from prorl.sandbox.node.proxy_client import ProxyClient
from prorl.sandbox.node.settings import NetworkSettings, Settings
from prorl.sandbox.node.uids import Uids
from prorl.sandbox.node.wanted import Images, UserTools
from prorl.sandbox.node.watchdog import LimitWatchdog
from prorl.sandbox.wire import WireError
from prorl.tools import bundle
from prorl.types import FailureCode, SandboxRef, SandboxSpec
from prorl.waits import wait_limit_s

START_S = wait_limit_s("sandbox.serve")
STOP_S = wait_limit_s("sandbox.stop")
BACKLOG = 16
"""Connections to a tool server that wait for it to start: of INIT, RUN, a shell, with room."""
RESERVE_BYTES = 64 << 20
"""Left to this process, or no further sandbox is begun."""
MEMORY_S = 0.2
"""Seconds between two readings of the free memory."""
CLEAN_S = wait_limit_s("sandbox.clean")
NEVER_STARTED = Exit(status=0, cpu_s=0.0)
"""Stands for the end of a launcher that was not asked for."""
BAD_TOOL = "bad tool: "
"""The words with which a tool server says that a user's tool cannot be made."""

log = logging.getLogger("prorl.sandboxd")

OnEnd = Callable[[LiveSandbox, Fate], None]


class Maker:
    """Owns the zygote, uids, control groups and every living sandbox of one kind."""

    def __init__(
        self, kind: str, root: Path, node_id: str, settings: Settings, on_end: OnEnd
    ) -> None:
        self._name, self._kind = kind, kinds.load(kind)
        self._has_launcher = self._kind.launch is not None
        self._root, self._node_id = root, node_id
        self._settings = settings
        self._on_end = on_end
        self._support = root / janitor.SUPPORT
        self._user_tools = UserTools(self._support)
        self._images = Images(kind, settings)
        self.network = ProxyClient(NetworkSettings(**settings.network))
        # A start waits for the kernel about half of its time; beyond four a core each takes longer
        # and none comes sooner.
        self._gate = asyncio.Semaphore(max(8, 2 * len(os.sched_getaffinity(0))))
        self._max_lives = min(settings.max_sandboxes, room())
        self._terminals_warning = short_of_terminals(settings.max_sandboxes)
        """Said when a sandbox waits for it."""
        self._room = asyncio.Semaphore(self._max_lives)
        self._short_of_memory = False
        self._looked_at, self._available = -MEMORY_S, 0
        """The time when the machine's memory was read last, and what was free then."""
        self._cleaners: set[asyncio.Task[None]] = set()
        self._closing = False
        self.sandboxes: dict[str, LiveSandbox] = {}
        self._ended = 0
        self._cpu_s = 0.0

    async def open(self) -> None:
        """Claim root and uids, sweep what others left, start the zygote. Raises ConfigError."""
        self._sockets = await claim(self._root)
        self._uids = Uids()
        # End and remove what earlier daemons left, the slow part of it in the background.
        if self._kind.shares_host:  # what sandboxes of a dead daemon left to their uids' next ones
            await asyncio.to_thread(janitor.remove_strays, self._uids.block)
        for folder in (self._root, *(self._root / name for name in janitor.FOLDERS)):
            folder.mkdir(mode=0o711, parents=True, exist_ok=True)
        await janitor.sweep(self._root, self._uids)
        await cgroups.remove_parents(self._sockets.name)
        for path in (self._root / "trash").iterdir():
            self._in_background(janitor.remove_later(path))
        self._in_background(janitor.sweep_orphans(self._sockets, self._uids))
        if self._kind.zipapp:
            self._support.mkdir(mode=0o755, exist_ok=True)
            bundle.write(self._support / "server.pyz")
            self._kind.install(str(self._support))
        self._cgroups = Cgroups(self._sockets.name, self._settings.cgroups)
        self._watchdog = LimitWatchdog(
            self.sandboxes,
            self._end_over_limit,
            memory="memory" not in self._cgroups.enforced,
            folder=None if self._kind.sized else self._root / "work",
            ptys=not self._kind.caps_ptys,
        )
        self._watching = asyncio.create_task(self._watchdog.run())
        self._start_zygote()

    def _end_over_limit(self, live: LiveSandbox, limit: str) -> None:
        self._in_background(self.end(live, fate_of(Cause.OVER_LIMIT, limit)))

    def _start_zygote(self) -> None:
        self._zygote = ZygoteClient(
            kinds.place(self._name),
            self._on_started,
            self._on_exit,
            self._on_zygote_lost,
        )
        self._zygote.start()

    @property
    def has_room(self) -> bool:
        return not self._room.locked()

    def status(self) -> dict[str, Any]:
        return {
            "kind": self._name,
            "live": len(self.sandboxes),
            "max_lives": self._max_lives,
            "short_of_memory": self._short_of_memory,
            "ended": self._ended,
            "cpu_s": self._cpu_s,
            "cgroups": list(self._cgroups.enforced),
            "watchdog": list(self._watchdog.watches),
            "watchdog_cpu_s": self._watchdog.cpu_s,
            "zygote_pid": self._zygote.pid,
            "proxy_pid": self.network.pid,
            "sandboxes": [
                {
                    "id": live.ref.sandbox_id,
                    "owner": live.owner,
                    "purpose": live.purpose,
                    "pid": live.pid,
                }
                for live in self.sandboxes.values()
            ],
        }

    async def make(self, spec: SandboxSpec) -> LiveSandbox:
        """Start one and wait until its tool server serves. Raises SandboxError."""
        spec = self.network.granted(granted(spec, self._settings))
        image = await self._images.image(spec)
        layer = await self._images.layer(spec, bool(image))
        self._user_tools.path_for(spec.tools)
        if self._terminals_warning and self._room.locked():
            log.warning("%s; the others wait", self._terminals_warning)
            self._terminals_warning = ""
        await self._room.acquire()
        try:
            async with self._gate:
                # A node short of memory takes fewer: one more would only have the kernel kill the
                # others. The first is always taken, else a node whose bound is too low would take
                # none for ever.
                while self.sandboxes and self._available_bytes() < RESERVE_BYTES:
                    self._short_of_memory = True
                    await asyncio.sleep(MEMORY_S)
                self._short_of_memory = False
                return await self._make(spec, image, layer)
        except OSError as cause:
            self._room.release()
            raise SandboxError(FailureCode.SANDBOX_START, f"{self._name}: {cause}") from cause
        except BaseException:
            self._room.release()
            raise

    def _available_bytes(self) -> int:
        """Returns the free memory as it was at most `MEMORY_S` ago: reading it costs as much as a
        fork.
        """
        now = asyncio.get_running_loop().time()
        if now >= self._looked_at + MEMORY_S:
            self._looked_at, self._available = now, memory.available_bytes()
        return self._available

    async def _make(self, spec: SandboxSpec, image: tuple[str, ...], layer: str) -> LiveSandbox:
        sandbox_id = secrets.token_hex(8)
        path = str(self._sockets.path / sandbox_id)
        check_socket_path(path)
        note = Note(
            sandbox_id=sandbox_id,
            pid=0,
            start_ticks=None,
            uid=self._uids.take(),
            socket=path,
            folder=str(self._root / "work" / sandbox_id) if self._kind.folder else "",
            cgroups=self._cgroups.folders(sandbox_id, spec.cpus),
        )
        live = LiveSandbox(SandboxRef(self._node_id, sandbox_id, path), spec, note)
        self.sandboxes[sandbox_id] = live
        try:
            _make_folder(note)
            self._cgroups.make(sandbox_id, spec.memory_bytes, spec.processes, spec.cpus)
            janitor.write_note(self._root, note)
            status_fd = self._launch(self._launch_record(note, spec, image, layer), path)
        except BaseException:
            live.exited.set_result(NEVER_STARTED)
            await self._clear_up(live, NEVER_STARTED, orphaned=False)
            raise
        # Wait until the tool server serves; one that does not is ended. Raises SandboxError.
        try:
            text = await read_status(status_fd, START_S)
            if text == "ok" and spec.network_mode != NO_NETWORK:
                text = await self._open_network(live)
        except BaseException:
            # The start was cancelled in the middle: end it in the background.
            fate = Fate(FailureCode.SANDBOX_START, "the start was given up")
            self._in_background(self.end(live, fate))
            raise
        finally:
            os.close(status_fd)
        if text != "ok":
            code = FailureCode.BAD_TASK if text.startswith(BAD_TOOL) else FailureCode.SANDBOX_START
            await self.end(live, Fate(code, text))
            raise SandboxError(code, f"{self._name}: {text or 'the launcher died'}")
        live.ready = True
        return live

    async def _open_network(self, live: LiveSandbox) -> str:
        """Serve the proxy's port, before anything of the task's runs: `ok`, or what is wrong."""
        network = NetworkPolicy(live.spec.network_mode, live.spec.allowed_hosts)
        try:
            await self.network.open(live.ref.sandbox_id, live.ref.socket_path, network)
        except (OSError, WireError) as cause:
            return f"no port for the network: {cause}"
        return "ok"

    def _launch(self, launch: Launch, path: str) -> int:
        """Ask the zygote; returns what the launcher's first words are read from.

        After an error nothing was asked.
        """
        status_read, status_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
                listener.bind(path)
                listener.listen(BACKLOG)
                self._zygote.launch(launch, listener, status_write)
        except BaseException:
            os.close(status_read)
            raise
        finally:
            os.close(status_write)
        return status_read

    def _launch_record(
        self, note: Note, spec: SandboxSpec, image: tuple[str, ...], layer: str
    ) -> Launch:
        return Launch(
            sandbox_id=note.sandbox_id,
            spec=spec,
            uid=note.uid,
            image=image[0] if image else "",
            under=image[1:],
            layer=layer,
            folder=note.folder,
            server=str(self._support / "server.pyz"),
            files=self.network.files_of(spec),
            cgroups=note.cgroups,
            user_tools=self._user_tools.path_for(spec.tools),
        )

    # ---- ending

    async def end(self, live: LiveSandbox, fate: Fate) -> None:
        """TERM to the launcher, KILL if that does not do, then nothing is left. Idempotent.

        Without a launcher, KILL to pid 1 at once: TERM is for a process that ends others.
        """
        if live.ending is None:
            live.ending = fate
            first = signal.SIGTERM if self._has_launcher else signal.SIGKILL
            self._zygote.kill(live.ref.sandbox_id, first)
            try:
                async with asyncio.timeout(STOP_S):
                    await asyncio.shield(live.exited)
            except TimeoutError:
                self._zygote.kill(live.ref.sandbox_id, signal.SIGKILL)
        await live.ended.wait()

    def frozen(self, live: LiveSandbox) -> Cause | None:
        """Returns the cause where a process of a living sandbox stands still that nothing inside
        can stop.
        """
        if self._kind.server_can_be_killed or not live.pid:
            return None
        return Cause.SERVER_FROZEN if any(map(is_stopped, to_init(live.pid))) else None

    def _on_started(self, sandbox_id: str, pid: int) -> None:
        live = self.sandboxes.get(sandbox_id)
        if live is not None:
            live.pid = pid
            live.note = replace(live.note, pid=pid, start_ticks=start_ticks(pid))
            janitor.write_note(self._root, live.note)

    def _on_exit(self, sandbox_id: str, exit_: Exit) -> None:
        self._cpu_s += exit_.cpu_s
        live = self.sandboxes.get(sandbox_id)
        if live is not None and not live.exited.done():
            live.exited.set_result(exit_)
            self._in_background(self._clear_up(live, exit_, orphaned=False))

    def _on_zygote_lost(self) -> None:
        """Watch each launcher to its end by its note.

        The zygote's death has killed them all, and nobody reaps for us.
        """
        lost = Exit(status=signal.SIGKILL, cpu_s=0.0)
        for live in list(self.sandboxes.values()):
            if not live.exited.done():
                live.exited.set_result(lost)
                self._in_background(self._clear_up(live, lost, orphaned=True))
        if not self._closing:
            self._start_zygote()

    async def _clear_up(self, live: LiveSandbox, exit_: Exit, orphaned: bool) -> None:
        fate = live.ending or self._fate_of_exit(live, exit_, orphaned)
        live.fate.set_result(fate)
        self.network.close(live.ref.sandbox_id)
        await asyncio.sleep(0)  # whoever asked why it ended hears it before all is cleared up
        if orphaned or (os.WIFSIGNALED(exit_.status) and self._has_launcher):
            # nobody has waited for the end of all that was inside
            await janitor.end_launcher(live.note)
            await janitor.end_uid(live.note)
        janitor.remove_remains(live.note, self._root / "trash")
        if self._kind.shares_host:
            await asyncio.to_thread(janitor.remove_strays, {live.note.uid})
        await cgroups.remove(live.note.cgroups)
        if live.note.folder:
            self._in_background(janitor.remove_later(self._root / "trash" / live.ref.sandbox_id))
        janitor.drop_note(self._root, live.ref.sandbox_id)
        del self.sandboxes[live.ref.sandbox_id]
        self._uids.give(live.note.uid)
        if live.ready:
            self._room.release()
        self._ended += 1
        self._on_end(live, fate)
        live.ended.set()

    def _fate_of_exit(self, live: LiveSandbox, exit_: Exit, orphaned: bool) -> Fate:
        if orphaned:
            return fate_of(Cause.LAUNCHER_KILLED, "its zygote has ended")
        return fate_of_exit(
            exit_.status,
            has_launcher=self._has_launcher,
            server_exposed=self._kind.server_can_be_killed,
            launcher_exposed=self._kind.server_can_be_killed and live.note.uid < 0,
            out_of_memory=Cgroups.out_of_memory(live.note.cgroups),
        )

    def _in_background(self, work: Any) -> None:
        task: asyncio.Task[None] = asyncio.create_task(work)
        self._cleaners.add(task)
        task.add_done_callback(self._cleaners.discard)

    async def close(self) -> None:
        self._closing = True
        self._watching.cancel()
        await asyncio.gather(self._watching, return_exceptions=True)
        sandboxes = list(self.sandboxes.values())
        await asyncio.gather(
            *(self.end(live, fate_of(Cause.STOPPED, "with sandboxd")) for live in sandboxes)
        )
        await self._images.close()
        if self._cleaners:
            await asyncio.wait(self._cleaners, timeout=CLEAN_S)
        self._zygote.close()
        self.network.shut_down()
        self._uids.close()
        self._cgroups.close()
        janitor.remove_folders(self._root)
        self._sockets.remove()


def granted(spec: SandboxSpec, settings: Settings) -> SandboxSpec:
    """Returns the sandbox that its spec gets: no more than the operator grants."""

    def at_most(value: float, most: float) -> float:
        return min(value or most, most) if most else value

    overlay = spec.overlay_bytes and int(at_most(spec.overlay_bytes, settings.max_overlay_bytes))
    return replace(
        spec,
        memory_bytes=int(at_most(spec.memory_bytes, settings.max_memory_bytes)),
        overlay_bytes=overlay,
        cpus=at_most(spec.cpus, settings.max_cpus),
    )


def _make_folder(note: Note) -> None:
    """The sandbox's folder on the host, its uid's; none for kinds that need none."""
    if note.folder:
        os.mkdir(note.folder, 0o700)
        if note.uid >= 0:
            os.chown(note.folder, note.uid, note.uid)
