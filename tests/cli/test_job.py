"""A job is checked whole before anything starts, and resumed with the settings it began with."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import orjson
import pytest

from prorl.cli.job import JobPlan, filter_text, free_name
from prorl.cli.run_job import code_of, hashes
from prorl.cli.settings import Job
from prorl.config import JOB_FILE
from prorl.errors import ConfigError, ConflictError
from prorl.schema.fields import SCHEMA_VERSION
from prorl.types import Json


def _tasks(folder: Path, *envs: str) -> str:
    path = folder / "My tasks.v2.jsonl"
    path.write_bytes(
        b"\n".join(
            orjson.dumps({"task_id": str(i), "env": env, "prompt": "x"})
            for i, env in enumerate(envs)
        )
    )
    return str(path)


def _started(root: Path, name: str, **job: Json) -> None:
    (root / name).mkdir(parents=True)
    (root / name / JOB_FILE).write_bytes(orjson.dumps({"name": name, **job}))
    (root / name / "manifest.json").write_bytes(orjson.dumps({"schema_version": SCHEMA_VERSION}))


def test_a_run_is_named_after_tasks_and_policy_and_never_twice(tmp_path: Path) -> None:
    job = Job(tasks=_tasks(tmp_path, "noop"), policy="flaky?p=0.3")
    assert free_name(tmp_path, job) == "my-tasks-flaky-1"
    (tmp_path / "my-tasks-flaky-1").mkdir()
    assert free_name(tmp_path, job) == "my-tasks-flaky-2"
    assert free_name(tmp_path, Job(tasks="???.jsonl", policy="http://h:1")) == "tasks-model-1"


def test_planning_makes_nothing(tmp_path: Path) -> None:
    plan = JobPlan.make(
        None, {"tasks": _tasks(tmp_path, "noop", "noop"), "n": 3}, [], root=tmp_path / "root"
    )
    assert (len(plan.tasks), plan.num_rollouts) == (2, 6)
    assert not (tmp_path / "root").exists()
    with pytest.raises(ConfigError, match="unknown agent 'nativ'"):
        JobPlan.make(
            None,
            {"tasks": _tasks(tmp_path, "noop"), "run": {"agent": "nativ"}},
            [],
            root=tmp_path / "root",
        )


@pytest.mark.parametrize("content", [b"", b'{"name": "r", "ta', b"[]"])
def test_a_damaged_job_is_refused_in_a_single_line(tmp_path: Path, content: bytes) -> None:
    _started(tmp_path, "r")
    (tmp_path / "r" / JOB_FILE).write_bytes(content)
    with pytest.raises(ConfigError, match=r"job.json is damaged; expected a JSON object"):
        JobPlan.make(None, {"name": "r"}, [], root=tmp_path, resume=True)


def test_a_resumed_job_keeps_its_settings_except_for_new_options(tmp_path: Path) -> None:
    _started(
        tmp_path,
        "r",
        tasks=_tasks(tmp_path, "noop"),
        policy="noop",
        n=2,
        run={"seed": 7, "filter": "dapo"},
        service={"init": {"slots": 3}},
    )
    plan = JobPlan.make(None, {"name": "r"}, ["service.run.slots=5"], root=tmp_path, resume=True)
    assert (plan.run.run_id, plan.run.seed, plan.run.filter, plan.num_rollouts) == (
        "r",
        7,
        "dapo",
        2,
    )
    assert (plan.service.init.slots, plan.service.run.slots, plan.service.backends) == (
        3,
        5,
        ("scripted:noop",),
    )
    latest = JobPlan.make(None, {}, [], root=tmp_path, resume=True)
    assert latest.run.run_id == "r"


def test_a_run_that_exists_is_not_started_again_by_accident(tmp_path: Path) -> None:
    _started(tmp_path, "r", tasks=_tasks(tmp_path, "noop"))
    with pytest.raises(ConflictError, match="`prorl run --resume r` goes on with it"):
        JobPlan.make(None, {"tasks": _tasks(tmp_path, "noop"), "name": "r"}, [], root=tmp_path)
    with pytest.raises(ConfigError, match=r"no run 'q' to resume in .*; expected one of: r"):
        JobPlan.make(None, {"name": "q"}, [], root=tmp_path, resume=True)


def test_a_filter_is_a_name_sql_or_a_file_of_it(tmp_path: Path) -> None:
    (tmp_path / "f.sql").write_text("select 1")
    assert [filter_text(text) for text in ("dapo", "select 2 as x", str(tmp_path / "f.sql"))] == [
        "dapo",
        "select 2 as x",
        "select 1",
    ]
    with pytest.raises(
        ConfigError,
        match=r"No such file .*; expected none, dapo, .*, or a readable file of SQL; did you",
    ):
        filter_text("dapoo")


WRITE = """
import sys
from pathlib import Path
from prorl.cli.job import JobPlan
from prorl.cli.run_job import _create

class Nobody:
    def create_run(self, **config): pass

_create(Nobody(), JobPlan.make(None, {"name": "r"}, [], root=Path(sys.argv[1]), resume=True))
"""


def test_a_job_that_is_written_again_is_never_half_a_job(tmp_path: Path) -> None:
    _started(tmp_path, "r", tasks=_tasks(tmp_path, "noop"), policy="noop")
    before = (tmp_path / "r" / JOB_FILE).read_bytes()
    env = {**os.environ, "PRORL_FAILPOINTS": "file.synced:kill"}
    argv = [sys.executable, "-c", WRITE, str(tmp_path)]
    assert subprocess.run(argv, env=env).returncode == -signal.SIGKILL
    assert (tmp_path / "r" / JOB_FILE).read_bytes() == before


def test_a_job_names_its_task_file_and_the_users_code_by_hash(tmp_path: Path) -> None:
    env = tmp_path / "capitals.py"
    env.write_text("one = 1\n")
    before = hashes([env, tmp_path / "gone"])
    env.write_text("one = 2\n")
    (path,) = before
    assert path == str(env)
    assert hashes([env])[path] != before[path]
    assert code_of(f"{env}:Capitals") == env
    assert code_of("math") is None
    code = code_of("prorl.envs.base:BaseEnv")
    assert code is not None
    assert code.name == "base.py"


async def test_a_plan_can_be_made_beside_a_loop_of_the_caller(tmp_path: Path) -> None:
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text('{"task_id": "t", "env": "noop", "prompt": "?"}')
    assert len(JobPlan.make(None, {"tasks": str(tasks)}, [], root=tmp_path / "root").tasks) == 1
