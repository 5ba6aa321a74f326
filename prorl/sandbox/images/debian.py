"""Images of a Debian suite, with packages from a mirror."""

from __future__ import annotations

import os
import pwd
import re
import shutil
import subprocess
from pathlib import Path

from prorl.errors import UserError
from prorl.sandbox.images.layers import ToolFailed

MIRROR = re.compile(r"https?://\S+/debian/?(?=\s|$)")


def make_debian(suite: str, tree: Path, work: Path, job: dict[str, str]) -> None:
    """Make the folder of a Debian suite by mmdebstrap or debootstrap.

    Raises UserError, ToolFailed.
    """
    given = job.get("mirror") or _host_mirror()
    mirror = [given] if given else []
    words = ["--variant=minbase", *([f"--include={job['include']}"] if job.get("include") else [])]
    if shutil.which("mmdebstrap"):
        _check_subuids(job["source"])
        archive = str(work / "root.tar")
        _run(job["source"], ["mmdebstrap", *words, "--format=tar", suite, archive, *mirror])
        tree.mkdir()
        unpack = ["tar", "--extract", "--file", archive, "--directory", str(tree)]
        _run(job["source"], [*unpack, "--no-same-owner", "--exclude=./dev/*"])
    elif shutil.which("debootstrap") and os.getuid() == 0:
        _run(job["source"], ["debootstrap", *words, suite, str(tree), *mirror])
    else:
        raise UserError(
            f"{job['source']} needs mmdebstrap, or debootstrap as root",
            "one that is installed",
            "apt-get install mmdebstrap",
        )


def _check_subuids(source: str) -> None:
    """Raise UserError where mmdebstrap could not make files of other owners."""
    if os.getuid() != 0 and not _has_subuids():
        raise UserError(
            f"{source} without root",
            "uids of one's own (/etc/subuid, newuidmap)",
            "add a line for this user to /etc/subuid and /etc/subgid, or build it as root",
        )


def _has_subuids() -> bool:
    """Whether this user may map a range of uids.

    Unpacking a package as `root` of a namespace needs it.
    """
    mine = (f"{os.getuid()}:", f"{pwd.getpwuid(os.getuid()).pw_name}:")
    path = Path("/etc/subuid")
    return (
        bool(shutil.which("newuidmap"))
        and path.is_file()
        and any(line.startswith(mine) for line in path.read_text().splitlines())
    )


def _host_mirror() -> str:
    """The Debian mirror that this machine uses itself, or an empty string."""
    for path in [Path("/etc/apt/sources.list"), *sorted(Path("/etc/apt/sources.list.d").glob("*"))]:
        if path.is_file():
            lines = [
                line for line in path.read_text().splitlines() if not line.lstrip().startswith("#")
            ]
            if match := MIRROR.search("\n".join(lines)):
                return match[0]
    return ""


def _run(source: str, argv: list[str]) -> None:
    if subprocess.run(argv, stdin=subprocess.DEVNULL, check=False).returncode != 0:
        raise ToolFailed(f"{source}: {argv[0]} failed", mistake=False)
