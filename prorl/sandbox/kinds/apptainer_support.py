"""What all sandboxes of the kind `apptainer` share on the host, made once by sandboxd.

There is a skeleton for sandboxes without an image, what stands at /opt/prorl inside, and the
configuration of Apptainer without what would cost each start.
"""

from __future__ import annotations

import os
import shutil
import subprocess

from prorl.sandbox.kinds import image_view
from prorl.sandbox.kinds.image_view import SUPPORT
from prorl.sandbox.launch.spec import (
    LAYER,
    SANDBOX_UID,
    WORKSPACE,
    interpreter,
    interpreter_roots,
)

IMAGE_SUPPORT = "image"
"""Beside the skeleton: what an image gets at /opt/prorl."""
SKELETON = (
    "usr",
    "etc",
    "tmp",
    "var/tmp",
    "proc",
    "sys",
    "dev",
    "root",
    "home",
    "opt/prorl",
    "workspace",
    "run",
)
"""Folders of what stands for an image; its /etc has the files of `ETC`."""
ETC = {
    "passwd": f"user:x:{SANDBOX_UID}:{SANDBOX_UID}::{WORKSPACE}:/bin/bash\n",
    "group": f"user:x:{SANDBOX_UID}:\n",
    "hosts": "127.0.0.1 localhost sandbox\n",
    "localtime": "",
    "hostname": "",
}
CONFIG, FLAT_CONFIG = "apptainer.conf", "flat.conf"
LEAN = {"binary path": "/nowhere", "config resolv_conf": "no"}
FLAT = {**LEAN, "enable overlay": "no", "enable underlay": "no"}


def program() -> str:
    """Apptainer's or Singularity's executable, or an empty string."""
    return shutil.which("apptainer") or shutil.which("singularity") or ""


def make_support(folder: str) -> None:
    """Make what every sandbox of this kind gets read-only at /opt/prorl.

    There is one for images, and one beside a skeleton, which takes the place of an image.
    """
    for name in ("bin", os.path.basename(LAYER)):
        os.makedirs(f"{folder}/{name}", exist_ok=True)
    for name in ("python", "python3"):
        if not os.path.lexists(f"{folder}/bin/{name}"):
            os.symlink(interpreter(), f"{folder}/bin/{name}")
    if not os.path.isdir(f"{folder}/{IMAGE_SUPPORT}"):
        _make_image_support(f"{folder}/{IMAGE_SUPPORT}", f"{folder}/server.pyz")
    if not os.path.exists(f"{folder}/{CONFIG}") and program():
        write_configs(folder)
    if not os.path.isdir(f"{folder}/skeleton"):
        _make_skeleton(f"{folder}/skeleton")


def write_configs(folder: str) -> None:
    """Write the site's configuration for images that are folders, without FUSE programs.

    They would be tried three times in each start. An Apptainer that runs setuid, or a Singularity,
    keeps its own.
    """
    said = subprocess.run(
        [program(), "buildcfg"], capture_output=True, text=True, check=False
    ).stdout
    built = dict(line.split("=", 1) for line in said.splitlines() if "=" in line)
    site = built.get("APPTAINER_CONF_FILE", "")
    if built.get("APPTAINER_SUID_INSTALL") != "0" or not os.access(site, os.R_OK):
        return
    with open(site) as file:
        lines = file.readlines()
    for name, settings in ((CONFIG, LEAN), (FLAT_CONFIG, FLAT)):
        kept = [line for line in lines if not line.startswith(tuple(settings))]
        with open(f"{folder}/{name}", "w") as file:
            file.writelines(
                [*kept, "\n", *(f"{key} = {value}\n" for key, value in settings.items())]
            )


def _make_image_support(folder: str, server: str) -> None:
    os.makedirs(f"{folder}/bin")
    for _, shown in image_view.parts():
        os.mkdir(folder + shown.removeprefix(SUPPORT))
    for name in ("python", "python3"):
        with open(
            f"{folder}/bin/{name}", "w", opener=lambda path, flags: os.open(path, flags, 0o755)
        ) as file:
            file.write(image_view.python_script())
    if os.path.exists(server):
        os.link(server, f"{folder}/server.pyz")


def _make_skeleton(skeleton: str) -> None:
    for name in SKELETON:
        os.makedirs(f"{skeleton}/{name}")
    for root in interpreter_roots():
        os.makedirs(skeleton + root, exist_ok=True)
    for name in ("bin", "sbin", "lib", "lib64"):
        os.symlink(f"usr/{name}", f"{skeleton}/{name}")
    if os.path.isdir("/etc/alternatives"):
        shutil.copytree("/etc/alternatives", f"{skeleton}/etc/alternatives", symlinks=True)
    if os.path.exists("/etc/ld.so.cache"):
        shutil.copy("/etc/ld.so.cache", f"{skeleton}/etc/ld.so.cache")
    for name, text in ETC.items():
        with open(f"{skeleton}/etc/{name}", "w") as file:
            file.write(text)
