"""Each kind of change that an agent makes to its image is seen by tests in a fresh sandbox."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from prorl.envs.harbor import HarborEnv
from prorl.sandbox.kinds import load
from prorl.tasks import load_tasks
from prorl.testing import Replies, isolated, play
from prorl.types import RolloutLimits, ToolCall
from tests.harbor_folders import TOML, make_folder
from tests.sandbox import small_image
from tests.sandbox.conftest import IMAGE_KINDS, short_folder

COMMON = """
import os, shutil, stat
def write(path, text="5"):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w") as file:
        file.write(text)
def read(path):
    with open(path) as file:
        return file.read()
def mode(path):
    return stat.S_IMODE(os.lstat(path).st_mode)
def same(*paths):
    return len({os.lstat(path).st_ino for path in paths}) == 1
os.chdir("/changes")
"""
CHANGES = {
    "a removed file": ("os.unlink('file')", "not os.path.lexists('file')"),
    "a removed folder": ("shutil.rmtree('tree')", "not os.path.lexists('tree')"),
    "a folder that is made anew": (
        "shutil.rmtree('again'); write('again/new')",
        "os.listdir('again') == ['new']",
    ),
    "a file in the place of a folder": (
        "shutil.rmtree('folder'); write('./folder')",
        "read('folder') == '5'",
    ),
    "a folder in the place of a link": (
        "os.unlink('link'); write('link/new')",
        "not os.path.islink('link') and os.listdir('link') == ['new'] == os.listdir('link')"
        " and os.listdir('target') == ['old']",
    ),
    "a link in the place of a folder": (
        "shutil.rmtree('linked'); os.symlink('target', 'linked')",
        "os.readlink('linked') == 'target'",
    ),
    "links that lead nowhere": (
        "os.symlink('nowhere', 'lost'); os.symlink('/no/where', 'lost2')",
        "os.readlink('lost') == 'nowhere' and os.readlink('lost2') == '/no/where'",
    ),
    "hard links": ("write('./a'); os.link('a', 'b')", "same('a', 'b') and read('b') == '5'"),
    "a hard link to a file of the image": (
        "os.link('kept', 'twin')",
        "read('kept') == read('twin') == 'kept'",  # an overlay may not know that both are one
    ),
    "a moved folder of the image": (
        "shutil.move('moving', 'moved')",
        "read('moved/below/old') == 'old' and not os.path.lexists('moving')",
    ),
    "modes": (
        "write('./tool'); os.chmod('tool', 0o4711); os.mkdir('open'); os.chmod('open', 0o1777)",
        "mode('tool') & 0o777 == 0o711 and mode('open') == 0o1777",
    ),
    "a mode of a folder of the image": ("os.chmod('dir', 0o711)", "mode('dir') == 0o711"),
    "a file that is closed": (
        "write('./closed-file'); os.chmod('closed-file', 0)",
        "mode('closed-file') == 0 and [os.chmod('closed-file', 0o600), read('closed-file')][1]"
        " == '5'",
    ),
    "a folder that is closed": (
        "write('closed/below/new'); os.chmod('closed/below', 0o555); os.chmod('closed', 0)",
        "mode('closed') == 0 and [os.chmod('closed', 0o700), mode('closed/below'),"
        " read('closed/below/new')][1:] == [0o555, '5']",
    ),
    "a pipe": ("os.mkfifo('pipe', 0o640)", "stat.S_ISFIFO(os.lstat('pipe').st_mode)"),
    "holes": (
        "write('./hole'); os.truncate('hole', 8 << 20)",
        "os.lstat('hole').st_size == 8 << 20 and os.lstat('hole').st_blocks < 1000"
        " and read('hole').strip('\\0') == '5'",
    ),
    "times": (
        "write('old/f'); [os.utime(p, (1e9, 1e9)) for p in ('old/f', 'old')]",
        "[os.lstat(p).st_mtime for p in ('old/f', 'old')] == [1e9, 1e9]",
    ),
    "attributes": (
        "write('./attr'); os.setxattr('attr', 'user.note', b'x\\0y')",
        "os.getxattr('attr', 'user.note') == b'x\\0y'",
    ),
    "names": (
        "[write(os.fsdecode(b'./' + n)) for n in (b'no\\xffutf', b'two\\nlines', b'-dash',"
        " b'n' * 255)]",
        "all(read(os.fsdecode(b'./' + n)) == '5' for n in (b'no\\xffutf', b'two\\nlines', b'-dash',"
        " b'n' * 255))",
    ),
    "an empty folder": ("os.makedirs('empty/empty')", "os.listdir('empty/empty') == []"),
    "other places": (
        "[write(f'{p}/new') for p in ('/tmp/a', '/var/tmp', '/root', '/root/.cache/app', '/home/u',"
        " '/opt/own', '/fresh', '/srv')]",
        "all(read(f'{p}/new') == '5' for p in ('/tmp/a', '/var/tmp', '/root', '/root/.cache/app',"
        " '/home/u', '/opt/own', '/fresh', '/srv'))",
    ),
    "a line of /etc/passwd": (
        "open('/etc/passwd', 'a').write('own:x:7:7::/:/bin/sh\\n')",
        "'own:x:7' in read('/etc/passwd')",
    ),
}
"""Statements of the agent's and the test's expression, by the kind of change."""


@pytest.fixture(scope="module")
def image() -> Iterator[Path]:
    with short_folder(0o755) as folder:
        image = small_image.make_image(folder, ("bash", "chmod", "mkdir", "rm"))
        changes = image / "changes"
        for name in ("tree/old", "again/old", "folder/old", "target/old", "linked/old", "dir/old"):
            (changes / name).parent.mkdir(parents=True)
            (changes / name).write_text("old")
        (changes / "moving/below").mkdir(parents=True)
        (changes / "moving/below/old").write_text("old")
        for name in ("file", "kept"):
            (changes / name).write_text(name)
        (changes / "link").symlink_to("target")
        yield image


def _python(lines: str) -> str:
    return f"/opt/prorl/bin/python3 -I - <<'END'\n{COMMON}{lines}\nEND\n"


@pytest.mark.parametrize("artifact_mb", [64, 0], ids=["in a fresh sandbox", "where it lies"])
@pytest.mark.parametrize("kind", IMAGE_KINDS)
async def test_each_kind_of_change_is_seen_by_the_tests(
    tmp_path: Path, image: Path, kind: str, artifact_mb: int
) -> None:
    if missing := load(kind).missing():
        pytest.skip(missing)
    checks = "".join(
        f"try:\n    seen[{name!r}] = int({check})\n"
        f"except Exception as error:\n    print({name!r}, repr(error))\n    seen[{name!r}] = 0\n"
        for name, (_, check) in CHANGES.items()
    )
    test = f"import json\nseen = {{'reward': 1}}\n{checks}"
    test += "open('/logs/verifier/reward.json', 'w').write(json.dumps(seen))"
    toml = TOML.replace("[environment]\n", f'[environment]\ndocker_image = "{image}"\n')
    make_folder(
        tmp_path / "task",
        **{"task.toml": toml, "tests/test.sh": f"#!/bin/bash\n{_python(test)}"},
    )
    (task,) = load_tasks(tmp_path / "task")
    command = _python("".join(f"{change}\n" for change, _ in CHANGES.values()))
    limits = RolloutLimits(artifact_mb=artifact_mb)
    replies = Replies(ToolCall("bash", {"command": command}), "done")
    played = await play(HarborEnv(), task, replies, boxes=isolated(kind), limits=limits)
    assert "Error" not in played.outputs[0], played.outputs
    assert played.trajectory.rescorable == bool(artifact_mb)
    lost = [part.name for part in played.score.parts if not part.value]
    assert not lost, f"{lost}: {played.score.log}"
