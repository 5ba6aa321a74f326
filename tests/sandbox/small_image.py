"""A root file system of a few megabytes, made from this machine's own programs: what tests build
images from.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

PROGRAMS = ("bash", "cat", "chown", "cut", "getopt", "id", "ls", "rm", "sed", "sleep", "touch")
"""What the tests call, and what Apptainer's `fakeroot` script calls."""


def make_image(folder: Path, programs: Sequence[str] = PROGRAMS) -> Path:
    """bash and a few programs with their libraries, and a file that only the image has.

    No Python.
    """
    image = folder / "image"
    for name in (
        "usr/bin",
        "usr/lib",
        "usr/lib64",
        "etc",
        "tmp",
        "var/tmp",
        "proc",
        "sys",
        "dev",
        "root",
        "opt",
        "home",
    ):
        (image / name).mkdir(parents=True)
    for name in ("bin", "lib", "lib64"):
        (image / name).symlink_to(f"usr/{name}")
    (image / "usr/bin/sh").symlink_to("bash")
    (image / "etc/passwd").write_text("root:x:0:0::/root:/bin/bash\n")
    (image / "etc/group").write_text("root:x:0:\n")
    (image / "etc/image-name").write_text("mine\n")
    for name in ("hosts", "resolv.conf", "localtime"):
        (image / "etc" / name).touch()
    for name in programs:
        path = shutil.which(name)
        assert path is not None
        libraries = [
            word
            for word in subprocess.check_output(["ldd", path], text=True).split()
            if word.startswith("/")
        ]
        for source in (os.path.realpath(path), *libraries):
            target = image / ("usr" + source.removeprefix("/usr"))
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target)
        if os.path.basename(os.path.realpath(path)) != name:
            (image / "usr/bin" / name).symlink_to(os.path.basename(os.path.realpath(path)))
    return image


def as_ordinary_user() -> list[str]:
    """Returns what to put before a Python command line to run it as nobody; empty when we are an
    ordinary user ourselves.
    """
    if os.getuid() != 0:
        return []
    code = Path(__file__).resolve()
    if any(not folder.stat().st_mode & 0o001 for folder in code.parents):
        pytest.skip(f"{code.parents[2]} is closed to other users, so none can be tried")
    program = (
        "import os, pwd, sys; from prorl.linux import calls; from prorl.sandbox.kinds.common import"
        " show_interpreter\ncalls.unshare(calls.CLONE_NEWNS); calls.mount(None, '/', None,"
        " calls.MS_REC | calls.MS_PRIVATE);"
        " show_interpreter()\ncalls.drop_to(pwd.getpwnam('nobody').pw_uid); os.execv(sys.argv[1],"
        " sys.argv[1:])"
    )
    return [sys.executable, "-c", program]
