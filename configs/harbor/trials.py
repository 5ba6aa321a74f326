"""Trials by Harbor's own runner (PyPI `harbor` 0.26, Python 3.12), in images that prorl has built.

    PYTHON312_WITH_HARBOR configs/harbor/trials.py JOBS.json TRIALS_FOLDER

JOBS.json is a list of `{"path": TASK, "agent": "oracle"|"nop", "images": {FOLDER: IMAGE}}`, where
FOLDER is the one that Harbor would build (`environment` or `tests` of the task) and IMAGE is
`{"layers": [FOLDER, topmost first], "variables": {}, "workdir": "/app"}`. One JSON row a job is
printed: the rewards of Harbor's verifier, or the exception that its trial ended with.

Tasks, agents, verifier and rewards are Harbor's. Only the environment is ours: an overlay of the
image's folders in namespaces of its own, without network, as root of a user namespace.
"""

import asyncio
import json
import os
import shutil
import sys
import tempfile
import warnings
from pathlib import Path

from harbor.environments.base import BaseEnvironment, ExecResult
from harbor.environments.capabilities import EnvironmentCapabilities
from harbor.models.trial.config import TrialConfig
from harbor.trial.trial import Trial

SPACES = ("--user", "--mount", "--net", "--pid", "--preserve-credentials")
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
HOLDER = r"""
import ctypes, os, signal, subprocess, sys
layers, folder = sys.argv[1:]
libc = ctypes.CDLL(None, use_errno=True)

def call(function, *arguments):
    if function(*arguments):
        raise OSError(ctypes.get_errno(), f"{function.__name__} {arguments}")

def mount(source, target, kind, flags=0, options=None):
    call(libc.mount, *(os.fsencode(word) if word else None for word in (source, target, kind)),
         flags, options)

for name in ("upper", "work", "root"):
    os.mkdir(f"{folder}/{name}")
maps = {"setgroups": "deny", "uid_map": f"0 {os.getuid()} 1", "gid_map": f"0 {os.getgid()} 1"}
os.unshare(os.CLONE_NEWUSER | os.CLONE_NEWNS | os.CLONE_NEWNET | os.CLONE_NEWPID)
for name, text in maps.items():
    with open(f"/proc/self/{name}", "w") as file:
        file.write(text)
child = os.fork()
if child:
    print(child, flush=True)
    os.waitpid(child, 0)
    sys.exit()
libc.prctl(1, signal.SIGKILL)
os.chdir(folder)
options = f"userxattr,lowerdir={layers},upperdir=upper,workdir=work"
mount("overlay", "root", "overlay", 0, options.encode())
os.chdir("root")
for name in ("dev", "proc", "tmp", ".old"):
    os.makedirs(name, exist_ok=True)
mount("tmpfs", "dev", "tmpfs")
os.mkdir("dev/shm")
for name in ("null", "zero", "full", "random", "urandom", "tty"):
    open(f"dev/{name}", "w").close()
    mount(f"/dev/{name}", f"dev/{name}", None, 4096)
for name, target in (("fd", "fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2")):
    os.symlink(f"/proc/self/{target}", f"dev/{name}")
mount("proc", "proc", "proc")
subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
call(libc.pivot_root, b".", b".old")
os.chdir("/")
call(libc.umount2, b"/.old", 2)
os.rmdir("/.old")
print("ready", flush=True)
while True:
    try:
        os.waitpid(-1, 0)
    except ChildProcessError:
        signal.sigtimedwait([], 1)
"""
"""Prints its child's process id, whose namespaces are the sandbox's, then "ready"."""


class BuiltImage(BaseEnvironment):
    """An image's folders below a folder that is written over."""

    def __init__(self, *arguments, images, **keywords):
        self.images = images
        super().__init__(*arguments, **keywords)

    @staticmethod
    def type():
        return "built-image"

    @property
    def capabilities(self):
        return EnvironmentCapabilities(disable_internet=True)

    def _validate_definition(self):
        pass

    async def start(self, force_build):
        image = self.images[str(self.environment_dir)]
        self.variables = {"PATH": PATH, "HOME": "/root", **image["variables"]}
        self.workdir = self.task_env_config.workdir or image["workdir"]
        self.folder = tempfile.mkdtemp(prefix="trial-")
        argv = (sys.executable, "-c", HOLDER, ":".join(image["layers"]), self.folder)
        self.holder = await asyncio.create_subprocess_exec(*argv, stdin=-3, stdout=-1)
        self.pid = int(await self.holder.stdout.readline())
        if await self.holder.stdout.readline() != b"ready\n":
            raise RuntimeError("the image's folders cannot be mounted")
        for name in (self.workdir, "/logs/agent", "/logs/verifier", "/logs/artifacts", "/tests"):
            os.makedirs(self._path(name), exist_ok=True)
        await self._upload_environment_dir_after_start()

    async def stop(self, delete):
        if self.holder.returncode is None:
            self.holder.kill()
            await self.holder.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _path(self, path):
        return f"/proc/{self.pid}/root/{str(path).lstrip('/')}"

    async def exec(self, command, cwd=None, env=None, timeout_sec=None, user=None):
        script = f"cd {cwd or self.workdir} && {{ {command}\n}}"
        process = await asyncio.create_subprocess_exec(
            *("nsenter", "-t", str(self.pid), *SPACES, "bash", "-c", script),
            env={**self.variables, **(self._merge_env(env) or {})},
            stdin=-3,
            stdout=-1,
            stderr=-1,
        )
        try:
            out, err = await asyncio.wait_for(process.communicate(), timeout_sec)
        except TimeoutError:
            process.kill()
            raise
        texts = {"stdout": out.decode(errors="replace"), "stderr": err.decode(errors="replace")}
        return ExecResult(**texts, return_code=process.returncode)

    async def upload_file(self, source_path, target_path):
        target = self._path(target_path)
        os.makedirs(os.path.dirname(target), exist_ok=True)
        shutil.copy(source_path, target)

    async def upload_dir(self, source_dir, target_dir):
        shutil.copytree(source_dir, self._path(target_dir), dirs_exist_ok=True)

    async def download_file(self, source_path, target_path):
        shutil.copy(self._path(source_path), target_path)

    async def download_dir(self, source_dir, target_dir):
        source = self._path(source_dir)
        shutil.copytree(source, target_dir, dirs_exist_ok=True, symlinks=True)


async def run_trial(job, folder):
    config = TrialConfig(
        task={"path": job["path"]},
        agent={"name": job["agent"]},
        environment={"import_path": "trials:BuiltImage", "kwargs": {"images": job["images"]}},
        timeout_multiplier=job.get("timeout_multiplier", 1.0),
        trials_dir=folder,
    )
    row = {"path": job["path"], "agent": job["agent"], "rewards": None, "exception": ""}
    try:
        result = await (await Trial.create(config)).run()
    except Exception as error:  # noqa: BLE001 a trial ends with whatever its code raises
        return {**row, "exception": f"{type(error).__name__}: {error}"}
    if result.verifier_result is not None:
        row["rewards"] = result.verifier_result.rewards
    infos = [result.exception_info, *(step.exception_info for step in result.step_results or [])]
    texts = [f"{info.exception_type}: {info.exception_message}" for info in infos if info]
    return {**row, "exception": "; ".join(texts)}


async def main(jobs, folder):
    for job in jobs:
        print(json.dumps(await run_trial(job, folder)), flush=True)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    sys.path.insert(0, str(Path(__file__).parent))
    asyncio.run(main(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])))
