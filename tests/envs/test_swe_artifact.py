"""The diff that an agent's work becomes: nothing that git is told, and nothing beside a fix, loses
the fix.
"""

from __future__ import annotations

import random
import subprocess
from pathlib import Path

import pytest

from prorl.envs.swe import SweEnv, workspace
from prorl.errors import SandboxError
from prorl.limits import MAX_ARTIFACT_BYTES
from prorl.testing import LocalSandbox, make_task
from prorl.types import Json, Task

ENV = SweEnv()
WRONG, RIGHT = "def half(n):\n    return n\n", "def half(n):\n    return n / 2\n"
PADDED = "".join(f"# line {number}\n" for number in range(30)) + WRONG


def _task(files: dict[str, str], **data: Json) -> Task:
    return make_task("swe", "Mend it.", files=files, **data)


async def _prepared(folder: Path, task: Task, *scripts: str) -> LocalSandbox:
    """A prepared workspace in which an agent has run these."""
    folder.mkdir(exist_ok=True)
    sandbox = LocalSandbox(folder)
    await workspace.prepare(task, sandbox)
    for script in scripts:
        done = await sandbox.exec(["bash", "-c", script], 60.0)
        assert done.exit_code == 0, done.output
    return sandbox


async def _replayed(folder: Path, task: Task, artifact: bytes) -> Path:
    """A fresh workspace with the change."""
    fresh = await _prepared(folder, task)
    applied = await workspace.apply(fresh, artifact)
    assert applied.exit_code == 0, applied.output
    return folder


def _git(folder: Path, *words: str) -> str:
    argv = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b", *words]
    return subprocess.run(argv, check=True, capture_output=True, text=True).stdout.strip()


# ---- settings of git

VARIABLES = [
    name
    for name in subprocess.run(
        ["git", "help", "--config"], check=True, capture_output=True, text=True
    ).stdout.split()
    if "." in name and "*" not in name and "<" not in name
]
SET_BY_HAND = [
    ("diff.mine.textconv", "echo"),
    ("diff.mine.command", "true"),
    ("filter.mine.clean", "rev"),
    ("filter.mine.required", "true"),
    ("extensions.objectFormat", "sha256"),
    ("core.repositoryFormatVersion", "1"),
    ("include.path", "/nowhere"),
]


@pytest.mark.parametrize("value", ["0", "true", "nonsense", "/dev/null"])
@pytest.mark.parametrize("where", [".git/config", ".gitconfig"])
async def test_no_setting_of_git_changes_the_artifact(
    tmp_path: Path, value: str, where: str
) -> None:
    """All that `git help --config` lists, in the repository's settings and in the user's."""
    assert len(VARIABLES) > 400
    task = _task({"half.py": PADDED, "caf\u00e9.txt": "a\r\nb\r\n"})
    work = (
        "sed -i 's|return n$|return n / 2|' half.py; printf 'a\\r\\n' > caf\u00e9.txt; echo > b.new"
    )
    plain = await ENV.artifact(task, "", await _prepared(tmp_path / "plain", task, work))
    assert plain.count(b"diff --git") == 3
    sandbox = await _prepared(tmp_path / "set", task, work)
    lines = [(name, value) for name in VARIABLES] + SET_BY_HAND
    sections = [(*name.rsplit(".", 1), text) for name, text in lines]
    with (sandbox.folder / where).open("a") as file:
        for section, name, text in sections:
            head, _, sub = section.partition(".")
            file.write(f'[{head} "{sub}"]\n' if sub else f"[{head}]\n")
            file.write(f"\t{name} = {text}\n")
    (sandbox.folder / ".git/info/attributes").write_text("* -text diff=mine filter=mine -diff\n")
    (sandbox.folder / ".git/info/exclude").write_text("*\n")
    assert await ENV.artifact(task, "", sandbox) == plain


@pytest.mark.parametrize(
    "git_setup",
    [
        "git config diff.context 0",
        "git config diff.orderFile /nowhere",
        "git config core.excludesFile $PWD/mine; echo '*' > mine",
        "git config core.sparseCheckout true; echo /x > .git/info/sparse-checkout",
        "git replace -f HEAD $(git commit-tree -m x $(git write-tree))",
        "git gc -q --prune=now; git pack-refs --all; git checkout -q --orphan other",
        "git config core.worktree /tmp",
    ],
)
async def test_a_fix_counts_under_any_git_configuration(tmp_path: Path, git_setup: str) -> None:
    task = _task({"half.py": PADDED})
    work = "sed -i 's|return n$|return n / 2|' half.py; echo 1 > new.py"
    sandbox = await _prepared(tmp_path / "run", task, git_setup, work)
    fresh = await _replayed(tmp_path / "eval", task, await ENV.artifact(task, "", sandbox))
    assert (fresh / "half.py").read_text() == PADDED.replace(WRONG, RIGHT)
    assert (fresh / "new.py").read_text() == "1\n"


# ---- what is tracked

IGNORED = {".gitignore": "build/\n*.log\n", "build/calc.py": WRONG}


async def test_a_tracked_file_that_gitignore_names_can_be_changed(tmp_path: Path) -> None:
    patch = "--- a/build/calc.py\n+++ b/build/calc.py\n--- /dev/null\n+++ b/build/new.py\n"
    setup = "mkdir -p build; echo > build/made.o; echo > made.log"
    for number, more in enumerate(({}, {"setup": setup})):
        task = _task(IGNORED, patch=patch, **more)
        work = "echo x = 1 > build/calc.py; echo y > build/new.py; echo z > build/other.py"
        sandbox = await _prepared(tmp_path / f"run{number}", task, work)
        artifact = await ENV.artifact(task, "", sandbox)
        assert b"build/other.py" not in artifact
        assert b"made" not in artifact
        fresh = await _replayed(tmp_path / f"eval{number}", task, artifact)
        assert (fresh / "build/calc.py").read_text() == "x = 1\n"
        assert (fresh / "build/new.py").read_text() == "y\n"


async def test_what_an_images_index_tracks_can_be_changed_and_what_was_built_is_no_change(
    tmp_path: Path,
) -> None:
    image = _repository(tmp_path / "image")
    (image / "build/made.o").write_text("made")
    task = _task({}, setup=f"cp -a {image}/. .")
    sandbox = await _prepared(
        tmp_path / "run", task, "echo x > build/calc.py; echo other > build/made.o"
    )
    artifact = await ENV.artifact(task, "", sandbox)
    assert b"build/calc.py" in artifact
    assert b"made.o" not in artifact


def _repository(folder: Path) -> Path:
    for path, text in IGNORED.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    _git(folder, "init", "-q")
    _git(folder, "add", "-A", "-f")
    _git(folder, "commit", "-qm", "first")
    return folder


async def test_repositories_that_are_test_data_stay_and_what_they_hold_can_be_changed(
    tmp_path: Path,
) -> None:
    image = _repository(tmp_path / "image")
    inner = image / "tests/fixture"
    inner.mkdir(parents=True)
    _repository(inner)
    source = _repository(tmp_path / "source")
    _git(image, "-c", "protocol.file.allow=always", "submodule", "add", "-q", str(source), "ext")
    _git(image, "commit", "-qm", "with a submodule")
    task = _task({}, setup=f"cp -a {image}/. .")
    work = (
        "echo x > tests/fixture/build/calc.py; echo y > ext/build/calc.py; git add -A; git status"
    )
    sandbox = await _prepared(tmp_path / "run", task, '[ -z "$(git status --porcelain)" ]', work)
    assert _git(sandbox.folder / "tests/fixture", "log", "--format=%s") == "first"
    assert not (sandbox.folder / "ext/.git").exists()
    for _ in range(2):  # an attempt that is carried on asks again
        artifact = await ENV.artifact(task, "", sandbox)
        assert (sandbox.folder / "tests/fixture/.git").is_dir()
    fresh = await _replayed(tmp_path / "eval", task, artifact)
    assert (fresh / "ext/build/calc.py").read_text() == "y\n"
    assert (fresh / "tests/fixture/build/calc.py").read_text() == "x\n"
    assert _git(fresh / "tests/fixture", "log", "--format=%s") == "first"


# ---- the version that packages ask of tags


COMMIT = "git commit -q --allow-empty -m"
BUILT = "mkdir it.egg-info; echo 'Version: {}' > it.egg-info/PKG-INFO"


@pytest.mark.parametrize(
    ("made", "described"),
    [
        ("git tag v1.2.3", "v1.2.3-0"),
        (f"git tag -am x v1.2.3; {COMMIT} a; {COMMIT} b", "v1.2.3-2"),
        (f"git tag release-2.0; git tag later; {COMMIT} a", "release-2.0-1"),
        (BUILT.format("3.1.4"), "v3.1.4-0"),
        (BUILT.format("3.1.4.dev7+gabc"), "v3.1.4.dev0-7"),
        (BUILT.format("3.1.4.dev20261128"), "v3.1.4.dev0-1"),
        (BUILT.format("3.1.4+7.gabc.dirty"), "v3.1.4-7"),
        (BUILT.format("0+unknown"), ""),
        ("true", ""),
    ],
)
async def test_tags_tell_the_version_that_the_producer_of_the_image_saw(
    tmp_path: Path, made: str, described: str
) -> None:
    """setuptools_scm makes `v3.1.4.dev0-7` to 3.1.4.dev7, versioneer `v3.1.4-7` to 3.1.4+7."""
    image = _repository(tmp_path / "image")
    named = "git config user.name a; git config user.email a@b"
    subprocess.run(["bash", "-c", f"set -e; {named}; {made}"], cwd=image, check=True)
    sandbox = await _prepared(tmp_path / "run", _task({}, setup=f"cp -a {image}/. ."))
    for options in ([], ["--tags"]):
        argv = ["git", "describe", *options, "--long"]
        output = (await sandbox.exec(argv, 10.0)).output
        assert output.startswith(f"{described}-g" if described else "fatal: No")
    log = (await sandbox.exec(["git", "log", "--all", "--format=%s"], 10.0)).output.split("\n")
    distance = int(described.rpartition("-")[2] or 0)
    assert log == ["base", *["history is left out"] * distance, ""]


# ---- more than an artifact may have


def _lock(size: int, seed: str) -> str:
    chance = random.Random(seed)
    return "".join(f'"{chance.randbytes(24).hex()}": 1,\n' for _ in range(size // 56))


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("package-lock.json", "generated"),
        ("poetry.lock", "generated"),
        ("web/app.min.js", "generated"),
        ("web/app.js", "generated"),
        ("logo.bin", "generated"),
        ("table.csv", "data"),
        ("fresh.py", "new"),
    ],
)
async def test_a_fix_counts_beside_files_that_are_too_large(
    tmp_path: Path, path: str, kind: str
) -> None:
    before, after = _lock(1 << 20, "before"), _lock(1 << 20, "after")
    if path in ("web/app.js",):
        before, after = before.replace("\n", ""), after.replace("\n", "")
    if path == "logo.bin":
        before, after = f"\0{before}", f"\0{after}"
    files = {"half.py": PADDED, "small.json": "1\n"} | ({} if kind == "new" else {path: before})
    task = _task(files)
    sandbox = await _prepared(tmp_path / "run", task)
    (sandbox.folder / path).write_text(after)
    (sandbox.folder / "half.py").write_text(PADDED.replace(WRONG, RIGHT))
    (sandbox.folder / "small.json").write_text("2\n")
    artifact = await ENV.artifact(task, "", sandbox)
    assert len(artifact) <= MAX_ARTIFACT_BYTES
    remark, diff = workspace.remark(artifact)
    assert remark.startswith("left out of the artifact")
    assert f"{path} (" in remark
    assert f" {kind})" in remark
    fresh = await _replayed(tmp_path / "eval", task, artifact)
    assert (fresh / "half.py").read_text() == PADDED.replace(WRONG, RIGHT)
    assert (fresh / "small.json").read_text() == "2\n"
    assert (fresh / path).exists() is (kind != "new")
    assert diff.count(b"diff --git") == 2


async def test_changes_of_the_reference_are_never_excluded(tmp_path: Path) -> None:
    patch = "--- a/poetry.lock\n+++ b/poetry.lock\n"
    task = _task({"poetry.lock": _lock(1 << 20, "before"), "a.lock": "x"}, patch=patch)
    sandbox = await _prepared(tmp_path / "run", task)
    (sandbox.folder / "poetry.lock").write_text(_lock(1 << 20, "after"))
    with pytest.raises(SandboxError, match=f"are more than {MAX_ARTIFACT_BYTES} bytes"):
        await ENV.artifact(task, "", sandbox)
