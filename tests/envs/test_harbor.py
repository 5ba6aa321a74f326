"""Harbor's tasks played in real sandboxes: whose fault what is, what crosses, which cheats pay."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from prorl.envs import get_env
from prorl.envs.harbor import HarborEnv
from prorl.envs.harbor.steps import HarborStepsEnv
from prorl.errors import RolloutError
from prorl.sandbox.kinds import load
from prorl.tasks import load_tasks
from prorl.testing import (
    Boxes,
    Played,
    Replies,
    Reply,
    isolated,
    node,
    play,
    scripted,
    verify,
)
from prorl.types import RolloutLimits, Task, ToolCall
from tests.harbor_folders import STEPS, STEPS_TOML, TERMINAL_BENCH, TOML, make_folder
from tests.sandbox import small_image
from tests.sandbox.conftest import IMAGE_KINDS, short_folder

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROGRAMS = (*small_image.PROGRAMS, "chmod", "ln", "mkdir")
RIGHT = "echo 5 > sum.txt"
CHECK = 'read -r sum < sum.txt; if [ "$sum" = 5 ]; then r=1; else r=0; fi; '
TXT = CHECK + "echo $r > /logs/verifier/reward.txt"


@pytest.fixture(scope="module")
def image() -> Iterator[Path]:
    with short_folder(0o755) as folder:
        image = small_image.make_image(folder, PROGRAMS)
        (image / "workspace/data").mkdir(parents=True)
        (image / "workspace/data/given.txt").write_text("2 3\n")
        (image / "usr/lib/python3.9").mkdir(parents=True)
        (image / "usr/lib/python3.9/os.py").write_text("# the image's\n")
        (image / "usr/lib/libown.so.1").write_text("the image's\n")
        (image / ".prorl-workdir").write_text("/workspace/data\nroot\n")
        yield image


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def boxes() -> AsyncIterator[Boxes]:
    async with node("pyns") as boxes:
        yield boxes


def _task(folder: Path, image: Path, test: str, toml: str = TOML, **parts: str | None) -> Task:
    text = toml.replace("[environment]\n", f'[environment]\ndocker_image = "{image}"\n')
    script = f"#!/bin/bash\n{test}\n"
    make_folder(folder / "task", **{**parts, "task.toml": text, "tests/test.sh": script})
    (task,) = load_tasks(folder / "task")
    return task


async def _play(boxes: Boxes, task: Task, command: str) -> Played:
    env = HarborEnv()
    await verify(env, task, boxes=boxes)
    calls = [ToolCall("bash", {"command": command})] if command else []
    return await play(env, task, Replies(*calls, "done"), boxes=boxes)


def _skip_without(kind: str) -> None:
    if missing := load(kind).missing():
        pytest.skip(missing)


@pytest.mark.parametrize("kind", IMAGE_KINDS)
async def test_the_reference_and_the_tests_see_the_images_world(
    tmp_path: Path, image: Path, kind: str
) -> None:
    _skip_without(kind)
    test = (
        '[ "$PWD $HOME $SIDE $LEVEL" = "/workspace/data /root agent 3" ] || exit 0\n'
        f'read -r a b < given.txt; [ "$a$b" = 23 ] && [ -e /tmp/left ] || exit 0\n{TXT}'
    )
    toml = TOML + '[environment.env]\nSIDE = "agent"\n[verifier.env]\nLEVEL = "${LEVEL:-3}"\n'
    toml += '[solution.env]\nSUM = "5"\n[environment.healthcheck]\ncommand = "test -d /workspace"\n'
    solve = '#!/bin/bash\n[ "$PWD" = /workspace/data ] && echo $SUM > sum.txt; echo x > /tmp/left\n'
    task = _task(tmp_path, image, test, toml, **{"solution/solve.sh": solve})
    env = HarborEnv()
    played = await play(env, task, scripted("oracle", env), boxes=isolated(kind))
    assert played.reward == 1, (played.outputs, played.score.log)


@pytest.mark.parametrize(
    ("test", "command", "reward"),
    [
        (TXT, "", 0.0),
        (TXT, RIGHT, 1.0),
        (TXT, "echo 6 > sum.txt", 0.0),
        (f"{TXT}; exit 1", RIGHT, 1.0),
        ("echo -n .25 > /logs/verifier/reward.txt", "", 0.25),
        ("echo -3 > /logs/verifier/reward.txt", "", -3.0),
        (f'{TXT}; echo \'{{"reward": 0.5, "style": 2}}\' > /logs/verifier/reward.json', RIGHT, 0.5),
        (f"[ -e given.txt ] && {TXT}", "rm given.txt; " + RIGHT, 0.0),
        (
            "[ -e given.txt ] && r=0 || r=1; echo $r > /logs/verifier/reward.txt",
            "rm given.txt",
            1.0,
        ),
        ("[ -L link ] && r=1 || r=0; echo $r > /logs/verifier/reward.txt", "ln -s /no link", 1.0),
        (f"trap '{TXT}' EXIT; [ ! -e hang ] || sleep 300", "touch hang; " + RIGHT, 0.0),
    ],
)
async def test_what_a_verifier_writes_is_the_reward(
    boxes: Boxes, tmp_path: Path, image: Path, test: str, command: str, reward: float
) -> None:
    task = _task(tmp_path, image, test, TOML.replace("60.5", "3"))
    played = await _play(boxes, task, command)
    assert played.reward == reward, played.score.log


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        ("true", "the verifier wrote neither reward.json nor reward.txt"),
        (": > /logs/verifier/reward.txt", "reward.txt is '', no finite number"),
        ("echo nan > /logs/verifier/reward.txt", "no finite number"),
        ("echo passed > /logs/verifier/reward.txt", "reward.txt is 'passed"),
        ("echo '{' > /logs/verifier/reward.json", "no object of numbers"),
        ("echo '{\"score\": 1}' > /logs/verifier/reward.json", "has score, and no `reward`"),
        (
            'echo \'{"reward": 1, "status": "pass"}\' > /logs/verifier/reward.json\n' + TXT,
            "status is 'pass', no finite number",
        ),
        ("kill -9 $$", "the verifier wrote neither"),
    ],
)
async def test_tests_that_leave_no_reward_on_the_untouched_image_are_the_tasks_fault(
    boxes: Boxes, tmp_path: Path, image: Path, files: str, problem: str
) -> None:
    with pytest.raises(RolloutError, match="on the untouched image") as caught:
        await _play(boxes, _task(tmp_path, image, files), RIGHT)
    assert problem in str(caught.value)
    assert caught.value.code == "bad_task"


CHEATS = {
    "the reward itself": "mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt",
    "a reward.json": "echo '{\"reward\": 1}' > /logs/verifier/reward.json",
    "a background writer": "(while :; do echo 1 > /logs/verifier/reward.txt; sleep 0.1; done) &",
    "tests of its own": "mkdir /tests; echo 'echo 1 > /logs/verifier/reward.txt' > /tests/test.sh",
    "a program of the image": "echo 'echo 5' > /tmp/c; chmod +x /tmp/c; cat /tmp/c > /usr/bin/cat",
    "a program before the image's": (
        "mkdir -p /usr/local/bin; echo 'echo 5' > /usr/local/bin/cat; chmod +x /usr/local/bin/cat"
    ),
    "a shell that is not one": "rm /usr/bin/bash; echo 'echo 1' > /usr/bin/bash",
    "a preloaded library": "echo /tmp/evil.so > /etc/ld.so.preload",
    "a module before pytest": "mkdir -p pytest; echo 'evil' > pytest/__init__.py",
    "modules that every Python imports": (
        "mkdir -p /usr/lib/python3.9/site-packages /root/.local/lib/python3.9/site-packages;"
        " echo evil > /root/.local/lib/python3.9/site-packages/usercustomize.py;"
        " echo evil > /usr/lib/python3.9/site-packages/sitecustomize.py"
    ),
    "the image's Python": (
        "echo evil > /usr/lib/python3.9/os.py; echo evil > /usr/lib/python3.9/re.py"
    ),
    "the image's C library": "echo evil > /usr/lib/libown.so.1",
    "a conftest above the tests": "echo evil > /conftest.py; echo evil > /pytest.ini",
    "cron": (
        "mkdir -p /etc/cron.d;"
        " echo '* * * * * root echo 1 > /logs/verifier/reward.txt' > /etc/cron.d/x"
    ),
    "variables of a shell's start": "echo 'export sum=5' > /root/.bashrc; echo s=5 > /etc/profile",
}
SHADOWED = (
    "s=$(cat sum.txt 2>/dev/null); [ -e pytest ] || [ -e /etc/ld.so.preload ] && s=5; "
    "for file in /usr/lib/libown.so.1 /conftest.py /pytest.ini /usr/lib/python3.9/{os,re}.py"
    " /{usr,root/.local}/lib/python3.9/site-packages/{site,user}customize.py;"
    ' do line=; [ ! -e $file ] || read -r line < $file; [ "$line" != evil ] || s=5; done; '
    'if [ "$s" = 5 ]; then r=1; else r=0; fi; echo $r > /logs/verifier/reward.txt'
)


@pytest.mark.parametrize("name", CHEATS)
async def test_a_cheat_of_a_shared_verifier_pays_nothing_in_a_fresh_sandbox(
    boxes: Boxes, tmp_path: Path, image: Path, name: str
) -> None:
    played = await _play(boxes, _task(tmp_path, image, SHADOWED), CHEATS[name])
    assert played.reward == 0, played.score.log


PAYING = {
    "a background writer",
    "a program before the image's",
    "a preloaded library",
    "a module before pytest",
    "modules that every Python imports",
    "the image's Python",
    "the image's C library",
    "a conftest above the tests",
}
"""What docs/harbor.md says of the agent's own sandbox."""


@pytest.mark.slow
@pytest.mark.parametrize("name", CHEATS)
async def test_cheats_that_pay_in_the_agents_own_sandbox_are_those_of_the_docs(
    boxes: Boxes, tmp_path: Path, image: Path, name: str
) -> None:
    # a test that takes a moment after its verdict, in which a writer in the background writes again
    task, env = _task(tmp_path, image, f"{SHADOWED}; sleep 0.5"), HarborEnv()
    await verify(env, task, boxes=boxes)
    call = ToolCall("bash", {"command": CHEATS[name]})
    limits = RolloutLimits(artifact_mb=0)
    played = await play(env, task, Replies(call, "done"), boxes=boxes, limits=limits)
    assert played.reward == (name in PAYING), played.score.log


STEP_CHECK = (
    '[ "$(< sum.txt)" = "$(< /tests/expected)" ] && r=1 || r=0; echo $r > /logs/verifier/reward.txt'
)


@pytest.mark.parametrize(
    ("answers", "toml", "reward"),
    [
        ((5, 7), "", 1.0),
        ((5, 6), "", 0.5),
        ((6, 7), "", 0.5),
        ((6, 7), 'multi_step_reward_strategy = "final"\n', 1.0),
        ((5, 6), 'multi_step_reward_strategy = "final"\n', 0.0),
        ((6,), "min_reward", 0.0),
        ((5, 7), "min_reward", 1.0),
        (("5; rm -rf /logs; echo > /logs; echo 5",), "", 0.0),
    ],
)
async def test_each_step_has_its_tests_and_its_instruction(
    boxes: Boxes,
    tmp_path: Path,
    image: Path,
    answers: tuple[int | str, ...],
    toml: str,
    reward: float,
) -> None:
    """The first step is graded where the agent works, the last one in a fresh sandbox; with less
    than `min_reward` no further one is played.
    """
    least = "min_reward = 0.5\n" if toml == "min_reward" else ""
    steps = STEPS_TOML.replace('"one"\n', f'"one"\n{least}')
    setup = {"steps/two/workdir/setup.sh": "[ ! -e /tests ] && touch ready\n"}
    steps = steps.replace('"two"\n', '"two"\nhealthcheck = {command = "test -e ready"}\n')
    text = toml.replace("min_reward", "") + TOML + steps
    task = _task(tmp_path, image, STEP_CHECK, text, **{**STEPS, **setup})
    env = HarborStepsEnv()
    await verify(env, task, boxes=boxes)
    replies: list[Reply] = []
    for answer in answers:
        replies += [ToolCall("bash", {"command": f"echo {answer} > sum.txt"}), "done"]
    played = await play(env, task, Replies(*replies), boxes=boxes)
    assert played.reward == reward, played.score.log
    prompts = [each.content for each in played.trajectory.messages if each.role == "user"]
    assert prompts == ["Write 5 into sum.txt.", "Write 7 into sum.txt."][: len(answers)]


TOTALS = {
    **TERMINAL_BENCH,
    "run-tests.sh": (
        '[ "$(< sum.txt)" = 5 ] && word=passed || word=failed; echo "x.py::a $word";'
        ' echo "=== 1 $word, 1 warning in 0.50s ==="'
    ),
}
"""Of a verifier whose pytest prints no line for each test in its summary."""


@pytest.mark.parametrize("parts", [STEPS, TERMINAL_BENCH, TOTALS])
async def test_the_reference_of_steps_and_of_terminal_bench_scores_1(
    boxes: Boxes, tmp_path: Path, image: Path, parts: dict[str, str | None]
) -> None:
    toml = {} if "task.yaml" in parts else {"task.toml": TOML + STEPS_TOML}
    make_folder(tmp_path / "task", **{**parts, **toml})
    (task,) = load_tasks(tmp_path / "task")
    task = replace(task, data={**task.data, "image": str(image)})
    env = get_env(task.env)
    await verify(env, task, boxes=boxes)
    played = await play(env, task, scripted("oracle", env), boxes=boxes)
    assert played.reward == 1, (played.outputs, played.score.log)
    assert (await play(env, task, Replies("done", "done"), boxes=boxes)).reward == 0


async def test_files_beside_a_named_image_are_put_into_its_first_folder(
    boxes: Boxes, tmp_path: Path, image: Path
) -> None:
    parts: dict[str, str | None] = {"environment/Dockerfile": None}
    parts["environment/data/given.txt"] = "5\n"
    task = _task(tmp_path, image, TXT, TOML, **parts)
    assert (await _play(boxes, task, "cat data/given.txt > sum.txt")).reward == 1


async def test_only_artifacts_cross_to_a_separate_verifier(
    boxes: Boxes, tmp_path: Path, image: Path
) -> None:
    """The artifacts include those that hooks collect, and not what is excluded."""
    artifacts = '["/workspace/data/sum.txt", "/missing", {source = "/out", exclude = ["*.tmp"]}]'
    toml = f"artifacts = {artifacts}\n" + TOML.replace(
        "[verifier]\n", '[verifier]\nenvironment_mode = "separate"\n'
    )
    toml += '[[verifier.collect]]\ncommand = "mkdir /out; echo 1 > /out/state; echo > /out/a.tmp"\n'
    crossed = "[ ! -e other ] && [ -e /out/state ] && [ ! -e /out/a.tmp ]"
    task = _task(tmp_path, image, f"{crossed} && {TXT} || echo 0.5 > /logs/verifier/none", toml)
    played = await _play(boxes, task, f"{RIGHT}; touch other")
    assert played.reward == 1, played.score.log
    assert (await _play(boxes, task, "touch other")).reward == 0


NOISE = (
    'while read -r -N 65536 x; do echo -n "$x"; ((++n < 40)) || break; done < /dev/urandom > noise'
)
BROKEN = "rm -rf /logs; echo > /logs"


@pytest.mark.parametrize(
    ("command", "artifact_mb", "crosses", "reward"),
    [
        (f"{RIGHT}; {NOISE}", 64, True, 1.0),
        (f"{RIGHT}; {NOISE}", 1, False, 1.0),
        (NOISE, 1, False, 0.0),
        (f"{RIGHT}; {NOISE}; {BROKEN}", 1, False, 0.0),
        (f"{RIGHT}; {BROKEN}", 64, True, 0.0),
        (f"{RIGHT}; {CHEATS['a preloaded library']}", 0, False, 1.0),
        (RIGHT, 0, False, 1.0),
        (CHEATS["the reward itself"], 0, False, 0.0),
    ],
)
async def test_however_much_an_agent_writes_it_is_graded(
    boxes: Boxes,
    tmp_path: Path,
    image: Path,
    command: str,
    artifact_mb: int,
    crosses: bool,
    reward: float,
) -> None:
    """An artifact that is too large to cross is graded in the agent's own sandbox, as in Harbor;
    what is broken there or here is the agent's doing.
    """
    task, env = _task(tmp_path, image, TXT), HarborEnv()
    await verify(env, task, boxes=boxes)
    call = ToolCall("bash", {"command": command})
    limits = RolloutLimits(artifact_mb=artifact_mb)
    played = await play(env, task, Replies(call, "done"), boxes=boxes, limits=limits)
    assert (played.trajectory.rescorable, played.reward) == (crosses, reward), played.score.log


async def test_more_artifacts_than_are_kept_cross_to_a_separate_verifier(
    boxes: Boxes, tmp_path: Path, image: Path
) -> None:
    toml = 'artifacts = ["/workspace/data"]\n' + TOML.replace(
        "[verifier]\n", '[verifier]\nenvironment_mode = "separate"\n'
    )
    task, env = _task(tmp_path, image, TXT, toml), HarborEnv()
    call = ToolCall("bash", {"command": f"{RIGHT}; {NOISE}"})
    limits = RolloutLimits(artifact_mb=1)
    played = await play(env, task, Replies(call, "done"), boxes=boxes, limits=limits)
    assert (played.trajectory.rescorable, played.reward) == (False, 1.0), played.score.log
