"""Probes which kinds of sandbox work on this machine: each is run, not looked for.

`probe()` tries every kind and says what it enforces, what it cannot, and how to mend what does not
work; `choose("auto")` takes the first of the table that works and never `local`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from prorl.errors import ConfigError, SandboxError
from prorl.sandbox import kinds
from prorl.sandbox.client import connected
from prorl.sandbox.node.pool import own_pool
from prorl.types import SandboxSpec
from prorl.waits import wait_limit_s

PROBE_S = wait_limit_s("sandbox.probe")
CPU_ON_REQUEST = "CPU time, where asked"
ADDED = {
    ("cgroups", "memory"): "memory of all processes together, by the kernel",
    ("cgroups", "pids"): "processes, by the kernel",
    ("cgroups", "cpu"): CPU_ON_REQUEST,
    ("watchdog", "memory"): "memory of all processes together, by a watchdog",
    ("watchdog", "ptys"): "number of terminals, by a watchdog",
    ("watchdog", "workspace"): "size of the workspace, by a watchdog",
}
"""The limits that a control group or, in its absence, the watchdog adds to those of a kind."""


_WORKING: set[str] = set()
"""The kinds that this process has seen at work: tests of an env open a sandbox for each task."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    kind: str
    works: bool
    reason: str
    """The reason why not, or what was run."""
    fix: str
    """The way to make it work; empty when it does."""
    enforces: tuple[str, ...]
    cannot: tuple[str, ...]


async def probe_kind(name: str) -> Probe:
    """Start one sandbox of this kind and run `true` and `id -u` in it."""
    kind = kinds.load(name)
    try:
        missing = kind.missing()
        if missing:
            raise ConfigError(missing)
        status = await _try(name)
    except (SandboxError, ConfigError, OSError) as error:
        why = str(error)
        return Probe(kind=name, works=False, reason=why, fix=kind.fix, enforces=(), cannot=())
    added = (feature for (by, name), feature in ADDED.items() if name in status[by])
    enforces, cannot = (*kind.enforces, *added), kind.cannot
    if CPU_ON_REQUEST in enforces:
        cannot = tuple(feature for feature in cannot if feature != "CPU share")
    ran = "ran a command as an ordinary user"
    return Probe(kind=name, works=True, reason=ran, fix="", enforces=enforces, cannot=cannot)


async def probe() -> list[Probe]:
    return [await probe_kind(name) for name in kinds.names()]


async def choose(kind: str = kinds.AUTO) -> str:
    """The first kind that works, or the one asked for. Raises ConfigError with one line."""
    if kinds.check(kind) != kinds.AUTO:
        if failed := await _failed_probe(kind):
            raise ConfigError(
                f"sandbox kind {kind} does not work here: {failed.reason}", hint=failed.fix
            )
        return kind
    reasons = []
    for candidate in kinds.automatic():
        failed = await _failed_probe(candidate)
        if failed is None:
            return candidate
        reasons.append(f"{candidate}: {failed.reason}")
    raise ConfigError(
        f"no sandbox works here ({'; '.join(reasons)})",
        "one of " + ", ".join(kinds.automatic()),
        "run `prorl doctor` for fixes; `local` isolates little and must be asked for",
    )


async def _failed_probe(kind: str) -> Probe | None:
    """The probe of a kind that does not work. One that works is tried once a process."""
    if kind in _WORKING:
        return None
    probe = await probe_kind(kind)
    if not probe.works:
        return probe
    _WORKING.add(kind)
    return None


async def _try(kind: str) -> Mapping[str, Any]:
    """Run two programs in a sandbox of this kind; the status of the pool that held it."""
    async with own_pool(kind) as pool:
        ref = await pool.start("probe", "run", SandboxSpec(tools=("bash",)))
        async with connected(ref, pool.fate) as sandbox:
            reply = await sandbox.exec(["id", "-u"], PROBE_S)
        status = pool.status()
    if reply.exit_code != 0 or reply.output.strip() in ("", "0"):
        raise ConfigError(
            f"`id -u` inside gave {reply.output.strip()!r} with exit code {reply.exit_code}",
            "an ordinary uid",
        )
    return status
