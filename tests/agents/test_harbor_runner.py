"""The same tasks played by us and by Harbor's own runner: the rewards are equal.

Harbor is in an environment of this host (`make test-adapters`); its agents are oracle and nop, and
the image's folders are those that our sandboxes have (`configs/harbor/trials.py`).
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from prorl.envs import get_env
from prorl.errors import RolloutError
from prorl.sandbox.kinds import load
from prorl.tasks import load_tasks
from prorl.testing import isolated, play, scripted, verify
from prorl.types import Json, Task
from tests.agents.test_guest_packages import VENVS
from tests.harbor_folders import STEPS, STEPS_TOML, TOML, make_folder
from tests.sandbox import small_image
from tests.sandbox.conftest import short_folder

PYTHON = VENVS / "harbor" / "bin" / "python"
TRIALS = Path(__file__).parents[2] / "configs" / "harbor" / "trials.py"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not PYTHON.exists(), reason=f"no environment of harbor at {VENVS}"),
]
PROGRAMS = ("chmod", "env", "find", "mkdir", "tar", "xargs")
BASH = "#!/bin/bash\n"
RIGHT = '[ "$(< sum.txt)" = 5 ] && r=1 || r=0; '
WRITES = "echo $r > /logs/verifier/reward.txt\n"
SEPARATE = f'artifacts = ["/work/sum.txt"]\n{TOML}'.replace(
    "[verifier]\n", '[verifier]\nenvironment_mode = "separate"\n'
)
LEAST = STEPS_TOML.replace('"one"\n', '"one"\nmin_reward = {least}\n')
TASKS: dict[str, dict[str, str | None]] = {
    "shared": {},
    "separate": {"task.toml": SEPARATE},
    "wrong-solution": {"solution/solve.sh": f"{BASH}echo 6 > sum.txt\n"},
    "half": {"tests/test.sh": f'{BASH}[ "$(< sum.txt)" = 5 ] && r=0.5 || r=0.125; {WRITES}'},
    "below-zero": {"tests/test.sh": f"{BASH}{RIGHT}r=$((r - 3)); {WRITES}"},
    "json-before-text": {
        "tests/test.sh": f'{BASH}{RIGHT}{WRITES}echo \'{{"reward": 0.25, "style": 3}}\''
        " > /logs/verifier/reward.json\n"
    },
    "text-in-json": {
        "tests/test.sh": f'{BASH}{RIGHT}{WRITES}echo \'{{"reward": 1, "status": "ok"}}\''
        " > /logs/verifier/reward.json\n"
    },
    "nothing-written": {"tests/test.sh": f"{BASH}exit 0\n"},
    "tests-exit-1": {"tests/test.sh": f"{BASH}{RIGHT}{WRITES}exit 1\n"},
    "variables": {
        "task.toml": f'{TOML}[environment.env]\nSIDE = "5"\n[solution.env]\nFIVE = "5"\n'
        '[verifier.env]\nLEVEL = "${LEVEL_OF_NOBODY:-5}"\n',
        "solution/solve.sh": f'{BASH}[ "$SIDE" = 5 ] && echo $FIVE > sum.txt\n',
        "tests/test.sh": f'{BASH}[ "$(< sum.txt)$SIDE" = $LEVEL$LEVEL ] && r=1 || r=0; {WRITES}',
    },
    "files-beside-the-image": {
        "environment/Dockerfile": None,
        "environment/given.txt": "5\n",
        "solution/solve.sh": f"{BASH}read -r given < given.txt; echo $given > sum.txt\n",
    },
    "steps-mean": {**STEPS, "task.toml": TOML + STEPS_TOML},
    "steps-final": {
        **STEPS,
        "task.toml": f'multi_step_reward_strategy = "final"\n{TOML}{STEPS_TOML}',
        "steps/one/solution/solve.sh": f"{BASH}echo 6 > sum.txt\n",
    },
    "steps-enough": {**STEPS, "task.toml": TOML + LEAST.format(least="{reward = 1}")},
    "steps-below": {
        **STEPS,
        "task.toml": TOML + LEAST.format(least=0.5),
        "steps/one/solution/solve.sh": f"{BASH}echo 6 > sum.txt\n",
    },
}


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with short_folder(0o755) as folder:
        image = small_image.make_image(folder, (*small_image.PROGRAMS, *PROGRAMS))
        (image / "work").mkdir()
        (image / ".prorl-workdir").write_text("/work\nroot\n")
        for name, parts in TASKS.items():
            toml = str(parts.get("task.toml", TOML))
            named = toml.replace("[environment]\n", f'[environment]\ndocker_image = "{image}"\n')
            make_folder(folder / name, **{**parts, "task.toml": named})
        yield folder


async def _play(task: Task, policy: str) -> float | None:
    env, boxes = get_env(task.env), isolated("pyns")
    try:
        await verify(env, task, boxes=boxes)
        return (await play(env, task, scripted(policy, env), boxes=boxes)).reward
    except RolloutError:
        return None


async def test_harbors_own_runner_gives_the_same_rewards(folder: Path) -> None:
    if missing := load("pyns").missing():
        pytest.skip(missing)
    image = {"layers": [str(folder / "image")], "variables": {}, "workdir": "/work"}
    jobs: list[Json] = []
    for name in TASKS:
        own = {str(folder / name / part): image for part in ("environment", "tests")}
        jobs += [
            {"path": str(folder / name), "agent": agent, "images": own}
            for agent in ("nop", "oracle")
        ]
    (folder / "jobs.json").write_text(json.dumps(jobs))
    argv = [str(PYTHON), str(TRIALS), str(folder / "jobs.json"), str(folder / "trials")]
    output = subprocess.run(argv, stdout=subprocess.PIPE, check=True, text=True).stdout
    trials = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    harbors = {
        (Path(row["path"]).name, row["agent"]): row["rewards"] and row["rewards"].get("reward")
        for row in trials
    }
    ours = {}
    for name in TASKS:
        (task,) = load_tasks(folder / name)
        ours[name, "nop"] = await _play(task, "noop")
        ours[name, "oracle"] = await _play(task, "oracle")
    assert ours == pytest.approx(harbors), trials
    assert sum(reward is not None for reward in ours.values()) == 2 * (len(TASKS) - 2)
