"""Builds the sdist and the wheel of the last commit into `dist/` (`make dist`).

Both are built twice from clean copies of the commit and must be equal byte for byte. Both must hold
exactly the commit's files: the wheel those of `prorl/` with its three links followed, the sdist
these and what its row of `pyproject.toml` names. `twine check` reads their metadata. With a tag as
its argument the version must be the tag's (`v0.1.0`).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"


def git(*words: str) -> str:
    command = ["git", "-C", str(ROOT), *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def build(folder: Path) -> list[Path]:
    """Returns the sdist and the wheel, built from a copy of the last commit below `folder`."""
    source, out = folder / "source", folder / "out"
    source.mkdir(parents=True)
    archive = folder / "source.tar"
    git("archive", "--output", str(archive), "HEAD")
    with tarfile.open(archive) as tar:
        # an attribute, since `extractall` of Debian 12's Python, 3.11.2, takes no filter
        tar.extraction_filter = getattr(tarfile, "data_filter", None)
        tar.extractall(source)
    # The archives' times are those of the commit, so that anybody builds the same bytes.
    env = {**os.environ, "SOURCE_DATE_EPOCH": git("log", "-1", "--format=%ct").strip()}
    command = [sys.executable, "-m", "build", "--outdir", str(out), str(source)]
    subprocess.run(command, check=True, env=env, stdout=subprocess.DEVNULL)
    return sorted(out.iterdir())


def package_files(tracked: list[str]) -> set[str]:
    """Returns the tracked files of the package, with its links to root folders followed."""
    links = [path.name for path in (ROOT / "prorl").iterdir() if path.is_symlink()]
    files = {name for name in tracked if name.startswith("prorl/")}
    files -= {f"prorl/{link}" for link in links}
    return files | {f"prorl/{name}" for name in tracked if name.partition("/")[0] in links}


def compare(archive: str, names: set[str], expected: set[str]) -> None:
    missing, unexpected = sorted(expected - names), sorted(names - expected)
    if missing or unexpected:
        sys.exit(f"error: {archive}: missing {missing}, unexpected {unexpected}")
    print(f"{archive}: {len(names)} files, all of the commit")


def main(tag: str = "") -> None:
    project = tomllib.loads(git("show", "HEAD:pyproject.toml"))
    version = project["project"]["version"]
    if tag and tag != f"v{version}":
        sys.exit(f"error: tag {tag}: expected v{version}, as pyproject.toml says")
    with tempfile.TemporaryDirectory() as temporary:
        first, second = (build(Path(temporary) / name) for name in ("first", "second"))
        for one, other in zip(first, second, strict=True):
            if one.read_bytes() != other.read_bytes():
                sys.exit(f"error: {one.name} differs when it is built again")
        shutil.rmtree(DIST, ignore_errors=True)
        shutil.copytree(first[0].parent, DIST)
    wheel, sdist = DIST / f"prorl-{version}-py3-none-any.whl", DIST / f"prorl-{version}.tar.gz"
    tracked = git("ls-tree", "-r", "--name-only", "HEAD").splitlines()
    package = package_files(tracked)
    metadata = ("METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE")
    info = {f"prorl-{version}.dist-info/{name}" for name in metadata}
    compare(wheel.name, set(zipfile.ZipFile(wheel).namelist()), package | info)
    with tarfile.open(sdist) as tar:
        names = {name.partition("/")[2] for name in tar.getnames()}
    patterns = project["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
    more = {name for name in tracked if any(Path("/", name).match(each) for each in patterns)}
    # hatchling adds these on its own
    more |= {"PKG-INFO", ".gitignore", "LICENSE", "README.md", "pyproject.toml"}
    compare(sdist.name, names, package | more)
    twine = [sys.executable, "-m", "twine", "check", "--strict", str(wheel), str(sdist)]
    subprocess.run(twine, check=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
