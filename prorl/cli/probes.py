"""Probes of this machine, each with its fix."""

from __future__ import annotations

import asyncio
import os
import resource
import shutil
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

from prorl.errors import ConfigError
from prorl.sandbox import kinds
from prorl.supervisor.places import make_socket_dir


class ProbeOutcome(NamedTuple):
    """What one probe of the machine found."""

    level: str
    """ok, warn or fail."""
    what: str
    found: str
    fix: str = ""


def probes(root: Path) -> Iterator[ProbeOutcome]:
    """Every probe, cheapest first."""
    yield _python()
    for package in ("pyarrow", "duckdb"):
        yield _package(package)
    yield _optional("torch", "prorl[torch]", "tensors in trainers")
    yield _optional("spython", "prorl[apptainer]", "`prorl image build` and unpacking .sif images")
    yield _cores()
    yield from _disk(root)
    yield _sockets()
    yield _descriptors()
    yield from _sandboxes()


def _python() -> ProbeOutcome:
    found = sys.version.split()[0]
    ok = sys.version_info >= (3, 11)
    return ProbeOutcome(
        "ok" if ok else "fail", "python", found, "" if ok else "use Python 3.11 or newer"
    )


def _package(name: str) -> ProbeOutcome:
    try:
        import_module("pyarrow.flight" if name == "pyarrow" else name)
        return ProbeOutcome("ok", name, version(name))
    except ImportError as error:
        return ProbeOutcome("fail", name, str(error), f"pip install {name}")


def _optional(name: str, extra: str, use: str) -> ProbeOutcome:
    try:
        return ProbeOutcome("ok", name, version(name))
    except PackageNotFoundError:
        return ProbeOutcome("warn", name, "not installed", f"pip install '{extra}' for {use}")


def _cores() -> ProbeOutcome:
    cores = len(os.sched_getaffinity(0))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    small = cores < 2 or memory < 3
    return ProbeOutcome(
        "warn" if small else "ok",
        "machine",
        f"{cores} cores, {memory:.0f} GiB",
        "2 cores and 3 GiB are comfortable" if small else "",
    )


def _disk(root: Path) -> Iterator[ProbeOutcome]:
    place = next(path for path in [root.absolute(), *root.absolute().parents] if path.exists())
    try:
        sync_ms = _fsync_ms(place)
    except OSError as error:
        yield ProbeOutcome("fail", "disk", f"{place}: {error.strerror}", "choose a writable --root")
        return
    slow = sync_ms > 20
    yield ProbeOutcome(
        "warn" if slow else "ok",
        "fsync",
        f"{sync_ms:.2f} ms at {place}",
        "a local SSD makes accepts and commits faster" if slow else "",
    )
    free = shutil.disk_usage(place).free / 2**30
    yield ProbeOutcome(
        "warn" if free < 5 else "ok",
        "disk",
        f"{free:.0f} GiB free at {place}",
        "free some, or choose another --root" if free < 5 else "",
    )


def _fsync_ms(place: Path) -> float:
    times = []
    with tempfile.TemporaryFile(dir=place) as file:
        for _ in range(9):
            file.write(b"x" * 4096)
            file.flush()
            start = time.perf_counter()
            os.fdatasync(file.fileno())
            times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


def _sockets() -> ProbeOutcome:
    try:
        path = make_socket_dir(Path("doctor"))
    except ConfigError as error:
        return ProbeOutcome("fail", "socket path", str(error))
    try:
        with socket.socket(socket.AF_UNIX) as probe, socket.create_server(("127.0.0.1", 0)):
            probe.bind(str(path / "probe.sock"))
        return ProbeOutcome(
            "ok", "sockets", f"Unix sockets under {path.parent}, ports on 127.0.0.1"
        )
    except OSError as error:
        return ProbeOutcome(
            "fail",
            "sockets",
            f"{path}: {error.strerror}",
            "set TMPDIR to a short path on a local disk",
        )
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _descriptors() -> ProbeOutcome:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    low = soft < 1024
    return ProbeOutcome(
        "warn" if low else "ok",
        "open files",
        f"{soft} (hard limit {hard})",
        "ulimit -n 4096" if low else "",
    )


def _sandboxes() -> Iterator[ProbeOutcome]:
    yield _user_namespaces()
    yield _control_groups()
    from prorl.sandbox.node.probe import probe

    found = asyncio.run(probe())
    best = next((item.kind for item in found if item.works and item.kind in kinds.automatic()), "")
    for item in found:
        if item.works:
            row = kinds.CATALOGUE.get(item.kind)
            words = (
                "auto takes it" if item.kind == best else "works",
                row.summary if row else "a user's",
                f"not enforced: {', '.join(item.cannot)}" if item.cannot else "",
            )
            yield ProbeOutcome("ok", f"sandbox {item.kind}", "; ".join(filter(None, words)))
        else:
            yield ProbeOutcome(
                "warn" if best else "fail", f"sandbox {item.kind}", item.reason, item.fix
            )


def _user_namespaces() -> ProbeOutcome:
    switch = Path("/proc/sys/user/max_user_namespaces")
    count = int(switch.read_text()) if switch.exists() else 0
    fix = (
        ""
        if count
        else "sysctl user.max_user_namespaces=10000 (as root) for sandboxes without root"
    )
    return ProbeOutcome("ok" if count else "warn", "user namespaces", f"at most {count}", fix)


def _control_groups() -> ProbeOutcome:
    from prorl.sandbox.node.delegation import usable

    versions = usable()
    if "memory" in versions:
        return ProbeOutcome(
            "ok",
            "control groups",
            ", ".join(f"{name} (version {version})" for name, version in versions.items()),
        )
    found = "none for memory: a watchdog looks at it each second and ends what uses too much"
    unified = Path("/sys/fs/cgroup/cgroup.controllers").exists()
    fix = (
        "systemd-run --user --scope -p Delegate=yes prorl ..."
        if unified
        else "version 1 is for root alone"
    )
    return ProbeOutcome("warn", "control groups", found, fix)
