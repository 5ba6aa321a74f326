"""Probes of this machine, each with its fix."""

from __future__ import annotations

import asyncio
import os
import platform
import resource
import shutil
import socket
import statistics
import tempfile
import time
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

from prorl import __version__
from prorl.errors import ConfigError, ProrlError
from prorl.net.join import ends_soon
from prorl.pluralize import pluralize
from prorl.sandbox import kinds
from prorl.supervisor.root import make_socket_dir

LONE = "root of a user namespace that has one uid, so nothing can be given another"
LONE_FIX = "give the namespace a range of uids (/etc/subuid), or run outside it as your own user"


class ProbeOutcome(NamedTuple):
    level: str
    """ok, warn or fail."""
    subject: str
    detail: str
    fix: str = ""

    @classmethod
    def warning(cls, subject: str, detail: str, fix: str, *, bad: bool) -> ProbeOutcome:
        """A warning with its fix where something is bad; else all is well."""
        return cls("warn", subject, detail, fix) if bad else cls("ok", subject, detail)


def probes(root: Path) -> Iterator[ProbeOutcome]:
    yield ProbeOutcome("ok", "prorl", __version__)
    yield ProbeOutcome("ok", "python", platform.python_version())
    for package in ("pyarrow", "duckdb"):
        yield _package(package)
    yield _optional("torch", "prorl[torch]", "tensors in trainers")
    yield _optional("spython", "prorl[apptainer]", "unpacking .sif images and building FILE.def")
    yield _cores()
    yield from _disk(root)
    # Certificates of a service that others reach and that end within a month. It renews them.
    if (root / "join").is_dir():
        for file, days in ends_soon(root).items():
            finding = f"{file} ends in {days:.0f} days" if days >= 0 else f"{file} has ended"
            fix = "start the service, which renews it; copy a join file to its users again"
            yield ProbeOutcome("warn", "certificate", finding, fix)
    yield _sockets()
    yield _descriptors()
    yield _terminals()
    yield from _sandboxes()
    yield _images()


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
    finding, fix = (
        f"{pluralize(cores, 'core')}, {memory:.0f} GiB",
        "2 cores and 3 GiB are comfortable",
    )
    return ProbeOutcome.warning("machine", finding, fix, bad=cores < 2 or memory < 3)


def _disk(root: Path) -> Iterator[ProbeOutcome]:
    place = next(path for path in [root.absolute(), *root.absolute().parents] if path.exists())
    try:
        times = []
        with tempfile.TemporaryFile(dir=place) as file:
            for _ in range(9):
                file.write(b"x" * 4096)
                file.flush()
                start = time.perf_counter()
                os.fdatasync(file.fileno())
                times.append((time.perf_counter() - start) * 1e3)
        sync_ms = statistics.median(times)
    except OSError as error:
        yield ProbeOutcome("fail", "disk", f"{place}: {error.strerror}", "choose a writable --root")
        return
    finding, fix = f"{sync_ms:.2f} ms at {place}", "a local SSD makes accepts and commits faster"
    yield ProbeOutcome.warning("fsync", finding, fix, bad=sync_ms > 20)
    free = shutil.disk_usage(place).free / 2**30
    finding, fix = f"{free:.0f} GiB free at {place}", "free some, or choose another --root"
    yield ProbeOutcome.warning("disk", finding, fix, bad=free < 5)


def _sockets() -> ProbeOutcome:
    try:
        path = make_socket_dir(Path("doctor"))
    except ConfigError as error:
        return ProbeOutcome("fail", "socket path", str(error))
    try:
        with socket.socket(socket.AF_UNIX) as probe, socket.create_server(("127.0.0.1", 0)):
            probe.bind(str(path / "probe.sock"))
        finding = f"Unix sockets under {path.parent}, ports on 127.0.0.1"
        return ProbeOutcome("ok", "sockets", finding)
    except OSError as error:
        fix = "set TMPDIR to a short path on a local disk"
        return ProbeOutcome("fail", "sockets", f"{path}: {error.strerror}", fix)
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _descriptors() -> ProbeOutcome:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    finding = f"{soft} (hard limit {hard})"
    return ProbeOutcome.warning("open files", finding, "ulimit -n 4096", bad=soft < 1024)


def _terminals() -> ProbeOutcome:
    from prorl.config import ServiceConfig
    from prorl.config.layout import num_sandboxes, settle
    from prorl.sandbox.kind import room, short_of_terminals

    few = short_of_terminals(num_sandboxes(settle(ServiceConfig())))
    fix = few.rpartition(": ")[2]
    finding = f"for {pluralize(room(), 'sandbox', 'sandboxes')} at once"
    return ProbeOutcome.warning("terminals", finding, fix, bad=bool(few))


def _sandboxes() -> Iterator[ProbeOutcome]:
    yield _user_namespaces()
    yield _control_groups()
    from prorl.sandbox.node.probe import probe

    sandboxes = asyncio.run(probe())
    best = next(
        (item.kind for item in sandboxes if item.works and item.kind in kinds.automatic()), ""
    )
    lone = os.getuid() == 0 and num_uids(Path("/proc/self/uid_map").read_text()) == 1
    for item in sandboxes:
        if item.works:
            row = kinds.CATALOGUE.get(item.kind)
            words = (
                "works, chosen by `auto`" if item.kind == best else "works",
                row.summary if row else "a user's",
                f"not enforced: {', '.join(item.cannot)}" if item.cannot else "",
            )
            yield ProbeOutcome("ok", f"sandbox {item.kind}", "; ".join(filter(None, words)))
        else:
            why, fix = (f"{LONE}: {item.reason}", LONE_FIX) if lone else (item.reason, item.fix)
            yield ProbeOutcome("warn" if best else "fail", f"sandbox {item.kind}", why, fix)


def _images() -> ProbeOutcome:
    """Probes how pulled layers are stored where images are kept, and what can build a
    Dockerfile.
    """
    from prorl.cli.settings import registry_root
    from prorl.sandbox.images import dockerfile
    from prorl.sandbox.images.pull import Pull
    from prorl.sandbox.images.registry import Registry

    place = registry_root(None)
    builder = dockerfile.program()
    try:
        stacks = Pull(Registry(place), {}).stacks
    except ProrlError as error:
        return ProbeOutcome("warn", "images", str(error), "choose a writable `sandbox.images`")
    way = (
        "stacked by overlayfs" if stacks else "merged by hard links: a start is as fast, disk more"
    )
    finding = (
        f"pulled without a daemon to {place}, layers {way}; Dockerfiles by {builder or 'none'}"
    )
    fix = "apt-get install buildah, where Dockerfiles are built"
    return ProbeOutcome.warning("images", finding, fix, bad=not builder)


def num_uids(uid_map: str) -> int:
    """Returns the number of uids of a user namespace.

    >>> num_uids("         0       1000          1\\n         1     100000      65536\\n")
    65537
    """
    return sum(int(line.split()[2]) for line in uid_map.splitlines())


def _user_namespaces() -> ProbeOutcome:
    switch = Path("/proc/sys/user/max_user_namespaces")
    count = int(switch.read_text()) if switch.exists() else 0
    fix = "sysctl user.max_user_namespaces=10000 (as root) for sandboxes without root"
    return ProbeOutcome.warning("user namespaces", f"at most {count}", fix, bad=not count)


def _control_groups() -> ProbeOutcome:
    from prorl.sandbox.node.cgroups import usable

    versions = usable()
    if "memory" in versions:
        finding = ", ".join(f"{name} (version {version})" for name, version in versions.items())
        return ProbeOutcome("ok", "control groups", finding)
    finding = "none for memory: a watchdog looks at it each second and ends what uses too much"
    unified = Path("/sys/fs/cgroup/cgroup.controllers").exists()
    fix = (
        "systemd-run --user --scope -p Delegate=yes prorl ..."
        if unified
        else "version 1 is for root alone"
    )
    return ProbeOutcome("warn", "control groups", finding, fix)
