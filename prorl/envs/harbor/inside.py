"""Programs that the env `harbor` runs inside its sandboxes, by the Python that each sandbox brings.

They need nothing of the image. Each is one text for `python3 -c`; its arguments are JSON. A pack is
a gzipped tar whose first member, `.prorl-meta.json`, lists what folders that changed hold, so that
whoever unpacks it removes what is no longer there.

What crosses from the agent's sandbox to the verifier's is what the agent changed, except for what
would change the verifier itself: `PROTECTED`, and programs, shared libraries and the Python that
the image has.
"""

from __future__ import annotations

import json
from typing import Any

PYTHON = ("/opt/prorl/bin/python3", "-I", "-S", "-B", "-c")
PACK = ".prorl-pack.tgz"
"""In the agent's folder: a pack on its way in or out."""
MARK = "/.prorl-start"
"""Made when the agent starts: what has changed since has a later ctime, which nobody can set."""

_COMMON = r"""
import errno, fnmatch, io, json, os, re, shutil, stat, sys, tarfile
ATTRIBUTE = "prorl.attribute."
SKIPPED = ("/proc", "/sys", "/dev", "/opt/prorl", "/tests", "/logs/verifier", "/.singularity.d",
           "/run", "/root/.cache/pip", "/root/.cache/uv", "/.prorl-workdir", "/.prorl-start")
PROTECTED = ("pytest", "pytest.py", "_pytest", "pluggy", "iniconfig", "sitecustomize.py",
             "usercustomize.py")
AT_ROOT = ("/conftest.py", "/pytest.ini", "/.pytest.ini", "/pyproject.toml", "/tox.ini",
           "/setup.cfg", "/etc/ld.so.preload", "/etc/environment")
LIBRARIES = ("/lib/", "/lib64/", "/usr/lib/", "/usr/lib64/")
STDLIB = re.compile(r"(.*/lib/python3[^/]*)/(?!site-packages/|dist-packages/).")
given = json.loads(sys.argv[1])
def skipped(path):
    return path.startswith(SKIPPED) and any(path == s or path.startswith(s + "/") for s in SKIPPED)
def changes_the_verifier(path):
    parts = path.split("/")
    return path in AT_ROOT or any(name in PROTECTED for name in parts)
"""

_PACK = (
    _COMMON
    + r"""
class Bounded(io.FileIO):
    def write(self, data):
        if self.tell() + len(data) > given["max_bytes"]:
            raise OverflowError
        return super().write(data)
def listening():
    # ports that somebody serves: processes do not cross
    found = set()
    for name in ("tcp", "tcp6"):
        try:
            with open("/proc/net/" + name) as file:
                rows = [line.split() for line in file][1:]
        except OSError:
            continue
        found.update(int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A")
    return sorted(found)
def changed(top, since, exclude):
    for folder, folders, names in os.walk(top):
        if exclude:
            for each in (folders, names):
                each[:] = [n for n in each if not excluded(top, os.path.join(folder, n), exclude)]
        folders[:] = [n for n in folders if not skipped(os.path.join(folder, n))]
        try:
            if os.lstat(folder).st_ctime_ns >= since:
                kept = [n for n in folders + names if not skipped(os.path.join(folder, n))]
                yield folder, sorted(kept)
            for name in names + [n for n in folders if os.path.islink(os.path.join(folder, n))]:
                path = os.path.join(folder, name)
                if not skipped(path) and os.lstat(path).st_ctime_ns >= since:
                    yield path, None
        except OSError:
            continue
def excluded(top, path, patterns):
    words = (os.path.basename(path), os.path.relpath(path, top))
    return any(fnmatch.fnmatch(word, pattern) for word in words for pattern in patterns)
def attributes(path):
    # no author of a task sees those of other name spaces
    try:
        names = [] if os.path.islink(path) else os.listxattr(path)
        names = [name for name in names if name.startswith("user.") and "overlay" not in name]
        return {ATTRIBUTE + name: os.getxattr(path, name).hex() for name in names}
    except OSError:  # a file system without any
        return {}
pack = given["pack"]
own = os.path.join(os.getcwd(), pack)
since = os.lstat(given["mark"]).st_ctime_ns if given["mark"] else 0
found = {}
for each in given["sources"]:
    source = each["source"]
    if os.path.isdir(source) and not os.path.islink(source):
        found.update(changed(source, since, each["exclude"]))
    elif os.path.lexists(source):
        found[source] = None
found.pop(own, None)
folders = {path: [n for n in names if os.path.join(path, n) != own]
           for path, names in found.items() if names is not None}
meta = {"folders": folders if given["mark"] else {}, "ports": listening()}
try:
    with Bounded(pack, "w") as file, tarfile.open(
        fileobj=file, mode="w:gz", compresslevel=1
    ) as tar:
        meta = json.dumps(meta).encode()
        info = tarfile.TarInfo(".prorl-meta.json")
        info.size = len(meta)
        tar.addfile(info, io.BytesIO(meta))
        for path, names in sorted(found.items()):
            try:
                info = tar.gettarinfo(path, path.lstrip("/") or ".")
                if info is None or info.type in (tarfile.CHRTYPE, tarfile.BLKTYPE):
                    continue  # a socket, a device
                info.pax_headers = attributes(path)
                if info.isreg():
                    with open(path, "rb") as content:
                        tar.addfile(info, content)
                else:
                    tar.addfile(info)
            except OSError as error:
                print("left out", ascii(path), error)
except (OverflowError, OSError):
    if os.path.lexists(pack):
        os.unlink(pack)
    sys.exit(4)
"""
)

_UNPACK = (
    _COMMON
    + r"""
pack, left_out = given["pack"], []
programs = set()
for folder in (os.environ.get("PATH", "") + ":/bin:/usr/bin").split(":"):
    if os.path.isdir(folder):
        programs.update(os.listdir(folder))
def protected(path):
    if not given["is_agents"]:
        return False
    folder, name = os.path.split(path)
    of_image = name in programs and os.path.basename(folder) in ("bin", "sbin")
    return of_image or of_system(path) or changes_the_verifier(path)
def of_system(path):
    # shared libraries and Pythons that the image brings
    if path.startswith(LIBRARIES) and ".so" in os.path.basename(path):
        return os.path.lexists(path)
    match = STDLIB.match(path)
    return match is not None and os.path.exists(match[1] + "/os.py")
def runs_at_start(tar, member):
    name = os.path.basename(member.name)
    if not given["is_agents"] or not member.isreg():
        return False
    if name.endswith(".pth"):
        return any(line.startswith((b"import ", b"import\t")) for line in tar.extractfile(member))
    return name == "entry_points.txt" and b"pytest11" in tar.extractfile(member).read()
def remove(path):
    try:
        os.unlink(path)
    except OSError as error:
        if error.errno != errno.EBUSY:
            raise  # else a file that is mounted there, as /etc/hosts may be: it is written over
def write(content, path, size):
    # holes stay holes, or files that fit into the agent's sandbox would not fit into this one
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    with open(path, "wb") as file:
        while piece := content.read(1 << 16):
            if piece.count(0) == len(piece):
                file.seek(len(piece), os.SEEK_CUR)
            else:
                file.write(piece)
        file.truncate(size)
def finish(path, member):
    try:
        for name, value in member.pax_headers.items():
            if name.startswith(ATTRIBUTE):
                os.setxattr(path, name.removeprefix(ATTRIBUTE), bytes.fromhex(value))
        os.utime(path, (member.mtime, member.mtime))
        os.chmod(path, member.mode)
    except (OSError, ValueError) as error:
        left_out.append(f"{path} ({error})")
folders = []
with tarfile.open(pack, "r:gz") as tar:
    # an attribute, since `extract` of Python 3.11.3 and older, as Debian 12 has it, takes no filter
    tar.extraction_filter = lambda member, path: member
    meta = json.load(tar.extractfile(tar.next()))
    for folder, names in meta.get("folders", {}).items():
        if not os.path.isdir(folder) or os.path.realpath(folder) != folder:
            continue  # the image has a link there, where the agent has a folder
        for name in set(os.listdir(folder)) - set(names):
            path = os.path.join(folder, name)
            if skipped(path) or protected(path) or path == os.path.join(os.getcwd(), pack):
                continue
            if os.path.isdir(path) and not os.path.islink(path):
                shutil.rmtree(path, ignore_errors=True)
            else:
                os.unlink(path)
    for member in tar:
        target = os.path.normpath(os.path.join(given["target"], member.name))
        if given["is_agents"] and (
            protected(target) or skipped(target) or runs_at_start(tar, member)
        ):
            left_out.append(target)
            continue
        try:
            is_folder = os.path.isdir(target) and not os.path.islink(target)
            if is_folder and not member.isdir():
                shutil.rmtree(target)
            elif os.path.lexists(target) and not is_folder:
                remove(target)
            if member.isdir():
                os.makedirs(target, exist_ok=True)
                folders.append((target, member))
            elif member.isreg():
                write(tar.extractfile(member), target, member.size)
                finish(target, member)
            else:
                member.uid = member.gid = os.getuid()
                member.uname = member.gname = ""
                tar.extract(member, given["target"])
        except OSError as error:
            left_out.append(f"{target} ({error.strerror})")
os.unlink(pack)
for target, member in reversed(folders):  # last: one may be closed, and each entry changes its time
    finish(target, member)
if left_out:
    print("not taken over:", ascii(", ".join(left_out[:20]))[1:-1])
if ports := meta.get("ports"):
    print("processes that served these ports have ended:", *ports[:20])
"""
)

_READ_REWARD = r"""
import json, os, re, stat
found = {}
for name in ("reward.json", "reward.txt"):
    try:
        fd = os.open("/logs/verifier/" + name, os.O_RDONLY | os.O_NONBLOCK)
        with open(fd, "rb") as file:
            found[name] = file.read(5000).decode("utf-8", "replace")
    except OSError:
        pass
try:
    with open("/logs/verifier/test-stdout.txt", "rb") as file:
        counts = {"passed": 0, "failed": 0}
        while line := file.readline(10000):
            word = line.partition(b" ")[0]
            if b"short test summary info" in line:
                counts = {"passed": 0, "failed": 0}
            counts["passed"] += word == b"PASSED"
            counts["failed"] += word in (b"FAILED", b"ERROR")
            if re.search(rb" in [0-9.]+s\b", line):
                totals = {word: int(n) for n, word in re.findall(rb"(\d+) ([a-z]+)", line)}
                if totals.keys() & {b"passed", b"failed", b"error", b"errors"}:
                    names = (b"failed", b"error", b"errors")
                    counts["passed"] = totals.get(b"passed", 0)
                    counts["failed"] = sum(totals.get(name, 0) for name in names)
        found.update({name: str(number) for name, number in counts.items()})
        file.seek(max(0, os.fstat(file.fileno()).st_size - 4000))
        found["log"] = file.read().decode("utf-8", "replace")
except OSError:
    pass
print()
print(json.dumps(found))
"""

START = f"mkdir -p /logs/agent /logs/artifacts /logs/verifier && : > {MARK}"
"""Before the agent starts."""

TEST = """cd "$PWD" && chmod +x /tests/test.sh && (/tests/test.sh) \
> /logs/verifier/test-stdout.txt 2>&1 < /dev/null"""
"""The exit code of the script means nothing: only the files that it writes do."""
CLEAR = (
    "mkdir -p /logs/verifier /logs/agent /logs/artifacts /tests"
    " && rm -rf /logs/verifier/reward.txt /logs/verifier/reward.json"
)
FORGET = "rm -rf /tests /logs/verifier && mkdir -p /logs/verifier"
"""Between two steps of a task: the next one sees nothing of the tests before it."""


def pack_argv(sources: list[dict[str, Any]], max_bytes: int, *, is_changes: bool) -> list[str]:
    """Packs files and folders, without what a source's `exclude` names; with `is_changes` only what
    has changed since `MARK`.
    """
    mark = MARK if is_changes else ""
    return _argv(_PACK, pack=PACK, sources=sources, max_bytes=max_bytes, mark=mark)


def unpack_argv(target: str, *, is_agents: bool) -> list[str]:
    """Unpacks what lies in `PACK`; `is_agents`: what would change the verifier is left out."""
    return _argv(_UNPACK, pack=PACK, target=target, is_agents=is_agents)


def reward_argv() -> list[str]:
    """Prints the reward files, how many tests passed and failed by pytest's last summary, and the
    end of the tests' output, as JSON.
    """
    return [*PYTHON, _READ_REWARD]


def _argv(program: str, **arguments: Any) -> list[str]:
    return [*PYTHON, program, json.dumps(arguments)]
