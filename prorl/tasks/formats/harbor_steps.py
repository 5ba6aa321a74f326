"""Harbor's tasks of several steps: `[[steps]]` in task.toml, and a folder `steps/NAME` for each.

    steps/NAME/instruction.md    what the agent is asked in this step
    steps/NAME/tests/            over the task's own tests/
    steps/NAME/solution/         in the place of the task's own solution/
    steps/NAME/workdir/          put into the first folder before the step; its setup.sh runs there

`prorl/envs/harbor/steps.py` plays them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from prorl.errors import TaskError
from prorl.tasks.formats.harbor_folder import (
    CONFIG,
    check_script,
    check_tests,
    read_instruction,
    read_variables,
    stated_network,
    unsupported,
)
from prorl.tasks.formats.harbor_toml import Step, TaskToml
from prorl.types import Json, Task


def with_steps(task: Task, folder: Path, config: TaskToml) -> Task:
    """The task of one step that was read, with its steps. Raises TaskError."""
    steps = config.steps or []
    separate = [step.name for step in steps if step.verifier.is_separate]
    if config.verifier.is_separate or separate:
        place = f", in {', '.join(separate)}" if separate else ""
        raise unsupported(f"a separate verifier with [[steps]]{place}", "a shared one")
    names = [step.name for step in steps]
    if len(set(names)) < len(names):
        raise TaskError(f"{CONFIG}: steps are called {', '.join(names)}", "a name for each step")
    read = [_step(folder, config, step, task.data["network"]) for step in steps]
    read[0]["workdir_files"] = [*task.data["workdir_files"], *read[0]["workdir_files"]]
    agent_s = [step.agent.timeout_sec or config.agent.timeout_sec or 0.0 for step in steps]
    tests_s = [step["verifier"]["timeout_s"] for step in read]
    data = {
        **task.data,
        "steps": read,
        "reward_strategy": config.multi_step_reward_strategy or "mean",
        # the tests of all steps but the last one run in the agent's time
        "agent_timeout_s": sum(agent_s) + sum(tests_s[:-1]) if all(agent_s) else None,
        "verifier": {**task.data["verifier"], "timeout_s": sum(tests_s)},
    }
    return replace(task, env="harbor_steps", prompt=read[0]["instruction"], data=data)


def _step(
    folder: Path, config: TaskToml, step: Step, networks: Mapping[str, dict[str, Json]]
) -> dict[str, Json]:
    own = folder / "steps" / step.name
    if not own.is_dir():
        raise TaskError(f"{CONFIG}: steps.name = {step.name!r}", f"a folder steps/{step.name}")
    for place, phase in (("agent", step.agent), ("verifier", step.verifier)):
        stated = stated_network(f"steps.{place}", phase)
        if stated not in (None, networks[place]):
            raise unsupported(
                f"a network of its own in the step {step.name!r}",
                f"that of the task's {place}: {networks[place]['network_mode']}",
            )
    if step.verifier.collect:
        raise unsupported(f"[[steps.verifier.collect]] in the step {step.name!r}", "none")
    has_tests = (own / "tests" / "test.sh").is_file()
    check_tests((own if has_tests else folder) / "tests")
    check_script(own / "solution" / "solve.sh")
    tests = [f"steps/{step.name}/tests", "tests"]
    solutions = [f"steps/{step.name}/solution", "solution"]
    workdir = f"steps/{step.name}/workdir"
    variables = {**config.verifier.env, **step.verifier.env}
    has_limit = "timeout_sec" in step.verifier.model_fields_set
    return {
        "name": step.name,
        "instruction": read_instruction(folder, f"steps/{step.name}/instruction.md"),
        "min_reward": _thresholds(step),
        "healthcheck": step.healthcheck and step.healthcheck.model_dump(),
        "workdir_files": [[workdir, "."]] if (folder / workdir).is_dir() else [],
        "has_setup": (folder / workdir / "setup.sh").is_file(),
        "solution": [[name, "."] for name in solutions if (folder / name / "solve.sh").is_file()][
            :1
        ],
        "verifier": {
            "tests": [[name, "."] for name in reversed(tests) if (folder / name).is_dir()],
            "timeout_s": (step if has_limit else config).verifier.timeout_sec,
            "environment": read_variables("steps.verifier.env", variables, is_hosts=True),
        },
    }


def _thresholds(step: Step) -> dict[str, float]:
    """The least rewards with which the next step is played, by their names."""
    if isinstance(step.min_reward, dict):
        return step.min_reward
    return {} if step.min_reward is None else {"reward": step.min_reward}
