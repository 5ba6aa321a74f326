"""Layers: Python packages for tasks that bring no image.

They are installed once a node and shown read-only to every sandbox that asks for the same.

A layer is a virtual environment (PEP 405) over our Python, without pip and without any package of
this machine's. It is kept in the registry of images under a digest of what it is made from:
requirements, wheels, interpreter. An index is named and not looked into, so a requirement that is
not pinned is what it was when the layer was made; `prorl image rm` lets it be made again.

Only wheels are installed, since an sdist would run its own code here. `npm:NAME@VERSION` is a
package of npm, whose scripts do not run either; its programs stand in `bin` beside the others, and
need the Node of the host's /usr unless they are native.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import cache_from_source
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from prorl.errors import StorageError, UserError
from prorl.sandbox.images.registry import Image, Registry
from prorl.sandbox.launch.spec import interpreter
from prorl.types import HOST_WHEELS

if TYPE_CHECKING:
    from importlib import metadata

    from packaging.requirements import Requirement

VERSION = 2
"""Changes when layers are made in another way."""
NPM = "npm:"
SHEBANG = b"#!/usr/bin/env python3\n"


UNREACHABLE = re.compile(
    "max retries exceeded|temporary failure in name resolution|timed out|network is unreachable"
    "|connection (?:refused|reset|aborted|broken)|5[0-9][0-9] (?:server error|error responses)",
    re.IGNORECASE,
)
"""The words of pip about an index that does not answer: nobody's mistake, and over some day."""


class ToolFailed(StorageError):
    """A tool made nothing; what it printed last says why.

    `mistake`: the source is to blame, as far as can be told.
    """

    def __init__(self, problem: str, mistake: bool) -> None:
        super().__init__(problem)
        self.mistake = mistake


class LayerRecipe(NamedTuple):
    requirements: tuple[str, ...]
    """The requirements as pip reads them, e.g. `pytest==8.4.2`, or `npm:NAME@VERSION`."""
    wheels: str
    """A folder of wheels, an index's URL, HOST_WHEELS, or empty for pip's own configuration."""

    @property
    def about(self) -> str:
        """The recipe in words, for people."""
        place = f" from {self.wheels}" if self.wheels else ""
        return f"packages {', '.join(self.requirements)}{place}"

    def digest(self) -> str:
        """Names the layer. Raises UserError for a folder that is none."""
        made_from = [
            VERSION,
            interpreter(),
            sys.version,
            sorted(self.requirements),
            self.wheels,
            self._offers(),
        ]
        return hashlib.sha256(json.dumps(made_from).encode()).hexdigest()

    def _offers(self) -> list[list[str | int]]:
        """Returns the packages that a folder, or this Python, offers now."""
        if self.wheels == HOST_WHEELS:
            distributions = closure(split(self.requirements)[0])
            return sorted(
                [distribution.metadata["Name"], distribution.version]
                for distribution in distributions
            )
        if not self.wheels or "://" in self.wheels:
            return []
        folder = Path(self.wheels)
        if not folder.is_absolute() or not folder.is_dir():
            raise UserError(
                f"wheels {self.wheels!r}",
                f"a folder of this node, an index's URL, or {HOST_WHEELS!r}",
            )
        stats = [(path.name, path.stat()) for path in sorted(folder.glob("*.whl"))]
        return [[name, about.st_size, about.st_mtime_ns] for name, about in stats]

    def job(self) -> dict[str, str]:
        """The recipe as the argument of the child process that makes the layer."""
        return {
            "do": "layer",
            "source": self.about,
            "digest": self.digest(),
            "requirements": json.dumps(self.requirements),
            "wheels": self.wheels,
        }


def make_layer(registry: Registry, job: dict[str, str]) -> Image:
    """Make a layer once. Raises UserError, StorageError where a tool is missing, OSError."""
    return registry.make(job["digest"], job["source"], lambda work: _fill(work, job))


def _fill(work: Path, job: dict[str, str]) -> None:
    os.umask(0o022)  # each sandbox reads it under a uid of its own
    tree = work / "tree"
    argv = [interpreter(), "-m", "venv", "--without-pip", "--symlinks", str(tree)]
    if not _ends_well(argv):
        raise ToolFailed(f"{job['source']}: no environment could be made", mistake=False)
    requirements, of_npm = split(json.loads(job["requirements"]))
    if job["wheels"] == HOST_WHEELS:
        packages = next(tree.glob("lib/python3*/site-packages"))
        _copy(closure(requirements), packages)
        # A sandbox cannot write bytecode there: what has none would be compiled at each start. A
        # file that cannot be compiled is a template that a package brings, and no failure.
        _ends_well([interpreter(), "-m", "compileall", "-qq", str(packages)])
    elif requirements:
        _install(requirements, tree, work, job)
    _free_scripts(tree)
    if of_npm:
        _install_npm(of_npm, tree, work, job)


def split(requirements: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns the requirements that pip reads, and those of npm without their mark."""
    of_npm = [
        requirement.removeprefix(NPM) for requirement in requirements if requirement.startswith(NPM)
    ]
    return [requirement for requirement in requirements if not requirement.startswith(NPM)], of_npm


def _install_npm(packages: Sequence[str], tree: Path, work: Path, job: dict[str, str]) -> None:
    if shutil.which("npm") is None:
        raise StorageError(
            f"{job['source']}: this node has no npm; install npm on each node, or give the task an"
            " image that has the program"
        )
    os.environ.pop("HOME", None)  # the account's own: its .npmrc names the registry, as pip's does
    where = tree / "npm"
    argv = [
        "npm",
        "install",
        "--cache",
        str(work / "npm"),
        "--ignore-scripts",
        "--no-audit",
        "--no-fund",
        "--loglevel=error",
    ]
    if not _ends_well([*argv, "--prefix", str(where), "--", *packages]):
        raise ToolFailed(f"{job['source']} could not be installed", mistake=True)
    for link in (where / "node_modules" / ".bin").iterdir():
        # where a script would have put a binary in the place of the package's own program
        native = sorted(filter(_is_elf, where.glob(f"node_modules/**/*linux*/**/{link.name}")))
        target = native[-1] if native else link
        (tree / "bin" / link.name).symlink_to(os.path.relpath(target, tree / "bin"))


def _is_elf(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(4) == b"\x7fELF"


def _install(requirements: Sequence[str], tree: Path, work: Path, job: dict[str, str]) -> None:
    wheels = job["wheels"]
    source = ["--index-url", wheels] if "://" in wheels else ["--no-index", "--find-links", wheels]
    log = work / "pip.log"  # tells more than pip prints: why a page of the index was left out
    argv = [
        sys.executable,
        *("-P", "-m", "pip", "--log", str(log), "--python", f"{tree}/bin/python", "install"),
        *("--quiet", "--no-input", "--disable-pip-version-check", "--only-binary", ":all:"),
        *(source if wheels else ()),
        *("--", *requirements),
    ]
    os.environ["HOME"] = str(work)
    if _ends_well(argv):
        return
    if failure := UNREACHABLE.search(log.read_text(errors="replace") if log.exists() else ""):
        problem = f"{job['source']}: the index could not be reached ({failure[0]})"
        raise ToolFailed(problem, mistake=False)
    raise ToolFailed(f"{job['source']} could not be installed", mistake=True)


def _ends_well(argv: list[str]) -> bool:
    return subprocess.run(argv, stdin=subprocess.DEVNULL, check=False).returncode == 0


def _free_scripts(tree: Path) -> None:
    """Let console scripts find their Python by PATH: a layer lies elsewhere inside."""
    for script in (tree / "bin").iterdir():
        if script.is_symlink() or not script.is_file():
            continue
        line, end, rest = script.read_bytes().partition(b"\n")
        if end and line.startswith(b"#!") and os.fsencode(tree) in line:
            script.write_bytes(SHEBANG + rest)


# ---- packages of this Python


def closure(names: Sequence[str]) -> list[metadata.Distribution]:
    """Distributions of this Python with all that they need, as they are installed here.

    One that is not installed is left out, as is what it needs. Raises UserError for a name that is
    no requirement, or asks for another version than is installed.
    """
    from importlib import metadata

    from packaging.requirements import Requirement

    distributions: dict[str, metadata.Distribution] = {}
    pending = [_requirement(name) for name in names]
    while pending:
        requirement = pending.pop()
        name = requirement.name.lower().replace("_", "-")
        if name in distributions:
            continue
        try:
            distributions[name] = metadata.distribution(requirement.name)
        except metadata.PackageNotFoundError:
            continue
        needs = map(Requirement, distributions[name].requires or ())
        pending += [need for need in needs if _applies(need)]
    return list(distributions.values())


def _requirement(name: str) -> Requirement:
    from importlib import metadata

    from packaging.requirements import InvalidRequirement, Requirement

    try:
        requirement = Requirement(name)
    except InvalidRequirement:
        raise UserError(
            f"the requirement {name!r}", "one as pip reads them, e.g. 'pytest==8.4.2'"
        ) from None
    try:
        version = metadata.version(requirement.name)
    except metadata.PackageNotFoundError:
        return requirement
    if not requirement.specifier.contains(version, prereleases=True):
        raise UserError(
            f"the requirement {name!r}",
            f"{requirement.name}=={version}, which this node has",
            f"wheels of it in a folder or an index in the place of {HOST_WHEELS!r}",
        )
    return requirement


def _applies(need: object) -> bool:
    marker = getattr(need, "marker", None)
    return marker is None or bool(marker.evaluate({"extra": ""}))


def _copy(distributions: Sequence[metadata.Distribution], target: Path) -> None:
    """Copy the files of packages, and the bytecode of their modules, whoever wrote that."""
    for distribution in distributions:
        for file in distribution.files or ():
            if ".." in file.parts:
                continue
            source = Path(str(distribution.locate_file(file)))
            _copy_file(source, target / file)
            if source.suffix == ".py":
                compiled = cache_from_source(str(target / file))
                _copy_file(Path(cache_from_source(str(source))), Path(compiled))


def _copy_file(source: Path, target: Path) -> None:
    """Copy a file, if it is there, with its time: bytecode names the time of its source."""
    if source.is_file():
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
        about = source.stat()
        os.utime(target, ns=(about.st_atime_ns, about.st_mtime_ns))
