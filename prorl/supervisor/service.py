"""A running service: all processes of one node on one root.

They are restarted when they die and ended in order. Start is parallel: every child dials until its
upstream listens. Processes are stopped in this order: workers first (nothing new), then stages
apart, a store apart (what was scored is committed), `service` (the gateway's log is last to close),
sandboxd.
Children die with the supervisor (PDEATHSIG); what a killed supervisor leaves on disk is swept by
the next one on the root.

A worker that was asked to leave exits with EXIT_DRAINED once it has nothing in hand, and is not
started again. Where its stages are part of `service`, that process prints `left` and goes on
without them. The node has left (`drained`) when all its stages have.

A frozen child counts as dead: one that falls silent, or that is not ready in time after a restart,
is killed through its pidfd and started again. Deaths while the root's disk is full, or refuses
writes, are not counted: the supervisor waits for the disk, and `trouble` says so.

Not promised: that a child's death is free. RUN's next incarnation goes on with the turns that its
journal holds; without one (`journal: off`) its death costs an attempt (`docs/architecture.md`).
"""

from __future__ import annotations

import asyncio
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Self

from prorl.config import ServiceConfig
from prorl.config.layout import SERVICE, settle
from prorl.errors import ConfigError, UnavailableError
from prorl.linux import crashes
from prorl.linux.files import disk_full
from prorl.linux.forked import EXIT_CRASHED, EXIT_DISK, EXIT_DRAINED, EXIT_REFUSED, EXIT_REPLACED
from prorl.supervisor.child import ChildProcess, ChildSpec, exit_text
from prorl.supervisor.root import Root
from prorl.supervisor.specs import STAGES, Specs, child_specs, settle_models
from prorl.timing import PROCESS_SILENCE_S
from prorl.types import Json
from prorl.waits import wait_limit_s

READY_S = wait_limit_s("supervisor.ready")

AGAIN_S = wait_limit_s("supervisor.ready_again")

QUARANTINE = "quarantine"
"""Folder of a root that says which rollouts have ended a worker, and how often."""

TICK_S = 0.5

FULL_WAIT_S = 5.0


MISTAKE = 2
"""Exit code of a program that refuses its arguments or settings: a restart would not help."""

MAX_RESTARTS = 5
"""Restarts of one child with no commit in between and no incarnation that lasted; after the next
death the service gives up. Two deaths are a task that is then left out (`crashes`), a third may be
another; more will not end by themselves.
"""

STEADY_S = 60.0
"""An incarnation that lasted this long was no crash loop, whether the service had work or not: what
fails at a start fails within seconds.
"""

BACKOFF_S = (0.0, 0.1, 0.2, 0.5, 1.0)
"""Wait before each restart; a first death costs nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Restarts:
    """Holds what the decision needs to know of one child."""

    count: int = 0
    """Restarts since the last commit."""
    commits: int = 0
    """Commits of the service when the child last died."""


def on_death(before: Restarts, commits: int, lived_s: float = 0.0) -> tuple[Restarts, float | None]:
    """Next state and the seconds to wait before a restart; None = give up.

    >>> state, wait_s = on_death(Restarts(), 0)
    >>> state.count, wait_s
    (1, 0.0)
    >>> tired = Restarts(count=5, commits=3)
    >>> on_death(tired, 3)[1] is None, on_death(tired, 4)[1], on_death(tired, 3, lived_s=90)[1]
    (True, 0.0, 0.0)
    """
    moved = commits > before.commits or lived_s >= STEADY_S
    count = 0 if moved else before.count
    if count >= MAX_RESTARTS:
        return before, None
    return replace(before, count=count + 1, commits=commits), BACKOFF_S[count]


class Supervisor:
    """`async with Supervisor(config) as supervisor:` is a service that listens.

    Leaving the block ends it and removes its traces.
    """

    def __init__(
        self,
        config: ServiceConfig,
        specs: Specs = child_specs,
        grace_s: float | None = None,
        silence_s: float = PROCESS_SILENCE_S,
        again_s: float = AGAIN_S,
    ) -> None:
        self._specs, self._grace_s = specs, grace_s
        self._silence_s, self._again_s = silence_s, again_s
        self._root = Root(config.root)
        self.config = config
        self.children: dict[str, ChildProcess] = {}
        self.ready: dict[str, Mapping[str, Json]] = {}
        """The facts that each child said when it listened."""
        self.restarts = 0
        self.trouble = ""
        """The outside event that the service waits for, in words."""
        self.deaths: deque[str] = deque(maxlen=MAX_RESTARTS)
        """The last children that died and were started again, with how they ended."""
        self._commits = 0
        self._watchers: list[asyncio.Task[None]] = []
        self._failed: asyncio.Future[None] | None = None
        self._stopping = self._leaving = False
        self.drained = asyncio.Event()
        """Set once every stage worker has left in order, or all were killed."""
        self._departed: set[str] = set()
        self._up = False

    @property
    def url(self) -> str:
        return http_url(self.config)

    async def __aenter__(self) -> Self:
        check_port(self.config.host, self.config.http_port)
        self._failed = asyncio.get_running_loop().create_future()
        self._root.acquire()
        try:
            await self._start()
        except BaseException:
            self.kill()
            await self._end()
            raise
        self._up = True
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._end()

    async def _start(self) -> None:
        settled = {
            "root": self._root.path,
            "socket_dir": self._root.socket_dir,
            "token": self.config.token or self._root.token(),
        }
        self.config = settle(settle_models(self.config)).model_copy(update=settled)
        self._root.open_to_others(self.config)
        self._root.write(self.config)
        log_dir = self._root.path / "logs"
        for spec in self._specs(self.config, str(self._root.service_file)):
            child = self.children[spec.name] = ChildProcess(spec, log_dir)
            await child.start()
        ready = await asyncio.gather(*(c.ready(READY_S) for c in self.children.values()))
        self.ready = dict(zip(self.children, ready, strict=True))
        service = self.ready.get(SERVICE, {})
        port = int(service.get("http_port", self.config.http_port))
        self.config = self.config.model_copy(update={"http_port": port})
        self.publish()
        for name, child in self.children.items():
            self._background(self._watch(child), f"watch {name}")
            if child.spec.has_stages:
                self._background(self._watch_stages(child), f"watch the stages of {name}")
        self._background(self._renew_certificates(), "renew certificates")
        watched = end_the_silent(lambda: self.children.values(), self._silence_s)
        self._background(watched, "listen")

    def publish(self) -> None:
        """Write ROOT/service.json, by which clients of this host find the service."""
        self._root.write(self.config)

    async def _renew_certificates(self) -> None:
        """Renews the certificates of the service and its join files; a node asks for its own."""
        while self.config.listen:
            look_s = await asyncio.to_thread(self._root.open_to_others, self.config)
            await asyncio.sleep(look_s)

    def note_commits(self, total: int) -> None:
        """Tell how many commits the service has made.

        A child that dies between commits is not a crash loop.
        """
        self._commits = max(self._commits, total)

    def deaths_since(self, restarts: int) -> list[str]:
        """Returns the deaths after the first `restarts` of the service, with how each ended."""
        num_new = self.restarts - restarts
        return list(self.deaths)[-num_new:] if num_new else []

    async def failed(self) -> None:
        """Wait until the service cannot go on; UnavailableError with the child's last words."""
        assert self._failed is not None
        await asyncio.shield(self._failed)

    async def drain(self, deadline_s: float) -> None:
        """Have the stages take nothing new, end what they have in hand, and leave.

        What is not ended after `deadline_s` is given back. Returns when they have left.
        """
        self._leaving = True
        self._tell_workers(signal.SIGUSR1)
        try:
            await asyncio.wait_for(self.drained.wait(), deadline_s)
        except TimeoutError:
            self._tell_workers(signal.SIGUSR2)
            await self.drained.wait()

    def _tell_workers(self, number: signal.Signals) -> None:
        for child in self.children.values():
            if child.spec.has_stages:
                child.signal(number)

    def _has_drained(self, child: ChildProcess, code: int) -> bool:
        """Returns whether a child that has ended is not to be started again."""
        if child.spec.module != STAGES or not (code == EXIT_DRAINED or self._leaving):
            return False
        self._note_leave(child)
        return True

    def _note_leave(self, child: ChildProcess) -> None:
        self._departed.add(child.spec.name)
        if all(name in self._departed for name, c in self.children.items() if c.spec.has_stages):
            self.drained.set()

    async def _watch_stages(self, child: ChildProcess) -> None:
        """Hear when the stages leave a process that goes on without them."""
        await child.stages_ended.wait()
        self._note_leave(child)

    async def run(self, spec: ChildSpec) -> None:
        """Run a program beside the service to its end.

        It is started again when it dies, and done when it exits with 0.

        Raises UnavailableError, with its last words, when it cannot go on or made a mistake (exit
        code 2).
        """
        child = self.children[spec.name] = ChildProcess(spec, self._root.path / "logs")
        await child.start()
        await self._watch(child, ends=True)

    async def _watch(self, child: ChildProcess, ends: bool = False) -> None:
        history = Restarts(commits=self._commits)
        while True:
            code = await child.exited()
            if self._stopping or (ends and code == 0):
                return
            how, name = exit_text(code), child.fatal_attempt
            if name:
                code = EXIT_CRASHED  # what a step left with says nothing of the service
            if self._has_drained(child, code):
                return
            if code == EXIT_REPLACED and self.config.gateway:
                # Started again it would be the newest incarnation, and take the other's place.
                self._fail(UnavailableError(f"another node {self.config.node_id!r} took our place"))
                return
            if code == EXIT_REFUSED and self.config.gateway:
                self._fail(UnavailableError(f"the service refuses us{child.last_words()}"))
                return
            if ends and code == MISTAKE:
                raise UnavailableError(
                    f"{child.spec.name} {exit_text(code)}{child.last_words()} (log: {child.log})"
                )
            lived_s = time.monotonic() - child.started_at_s
            history, wait_s = on_death(history, self._commits, lived_s)
            if name:
                # No crash loop: that piece of work is not touched again before long.
                how = ", ".join(filter(None, (how, child.ended_for, child.place())))
                crashes.charge(self._root.path / QUARANTINE, name, f"{child.spec.name} {how}")
                history, wait_s = Restarts(commits=self._commits), BACKOFF_S[1]
            if code == EXIT_DISK:
                self.trouble = f"{child.spec.name}{child.last_words()}"
                history, wait_s = Restarts(commits=self._commits), FULL_WAIT_S
            elif await self._outlast_full_disk():
                wait_s = FULL_WAIT_S
            if wait_s is None:
                text = (
                    f"{child.spec.name} {exit_text(code)} again and again with no commit in between"
                )
                self._fail(UnavailableError(f"{text}{child.last_words()} (log: {child.log})"))
                return
            self.restarts += 1
            self.deaths.append(f"{child.spec.name} {how}")
            await asyncio.sleep(wait_s)
            if self._has_drained(child, code):
                return
            await self._restart(child)

    async def _outlast_full_disk(self) -> bool:
        """Wait as long as the root's disk is full; whether it was."""
        was_full = False
        while full := disk_full(self._root.path):
            self.trouble, was_full = full, True
            await asyncio.sleep(FULL_WAIT_S)
        self.trouble = ""
        return was_full

    async def _restart(self, child: ChildProcess) -> None:
        while True:
            try:
                (self.config.socket_dir / f"{child.spec.name}.sock").unlink(missing_ok=True)
                await child.start()
                break
            except OSError as error:  # its log cannot be written, no process can be made
                self.trouble = f"{child.spec.name} cannot be started: {error}"
                await asyncio.sleep(FULL_WAIT_S)
        self.trouble = ""
        try:
            self.ready[child.spec.name] = await child.ready(self._again_s)
        except UnavailableError:
            child.end(f"not ready {self._again_s:g} s after its start: ended by the supervisor")
        else:
            if self._leaving and child.spec.has_stages:
                child.signal(
                    signal.SIGUSR2
                )  # its last incarnation took with it what it had in hand

    def _background(self, work: Coroutine[None, None, None], name: str) -> None:
        """A task whose failure is the service's."""
        task = asyncio.create_task(work, name=name)
        task.add_done_callback(self._ended)
        self._watchers.append(task)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(UnavailableError(f"the supervisor cannot {task.get_name()}: {error!r}"))

    def _fail(self, error: UnavailableError) -> None:
        assert self._failed is not None
        if not self._failed.done():
            self._failed.set_exception(error)
            self._failed.exception()

    def kill(self) -> None:
        """End every child now, without asking; `__aexit__` then finds nothing to wait for."""
        self._stopping = True
        self.drained.set()
        for child in self.children.values():
            child.signal(signal.SIGKILL)

    async def _end_watchers(self) -> None:
        self._stopping = True
        for watcher in self._watchers:
            watcher.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)

    async def _end(self) -> None:
        await self._end_watchers()
        for rank in sorted({child.spec.stop_rank for child in self.children.values()}):
            members = [child for child in self.children.values() if child.spec.stop_rank == rank]
            await asyncio.gather(*(child.stop(self._grace_s) for child in members))
        self._root.release(forget=not self._up)


async def end_the_silent(children: Callable[[], Iterable[ChildProcess]], silence_s: float) -> None:
    """Ends each child that falls silent, for as long as it runs."""
    while True:
        await asyncio.sleep(TICK_S)
        for child in children():
            if child.silence(TICK_S) >= silence_s:
                child.end(f"silent for {silence_s:g} s: ended by the supervisor")


def http_url(config: ServiceConfig) -> str:
    """Returns where HTTP clients find a service with this resolved config."""
    host = f"[{config.host}]" if ":" in config.host else config.host
    return f"http://{host}:{config.http_port}"


def check_port(host: str, port: int) -> None:
    """Raise ConfigError when a wanted port is taken."""
    if port == 0:
        return
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(
                f"port {port} of {host}: {error.strerror}",
                "a free port",
                "choose another (--port, or the one in --listen), or 0 for any",
            ) from None
