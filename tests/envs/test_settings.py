"""Settings of envs: 15 wrong ones are one line each before the run exists; right ones reach the
prompt, the tools and the grader; they are part of the task and of the run's manifest.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import orjson
import pytest

from prorl import env_settings
from prorl.cli.app import dispatch
from prorl.cli.job import JobPlan
from prorl.envs.users import check_settings_of, env_by_name, open_env
from prorl.errors import ConfigError, TaskError
from prorl.storage.read.catalog import StoredRun
from prorl.task_json import task_from_json
from prorl.tasks import load_tasks
from prorl.testing import make_task
from prorl.types import Json, Stage
from tests.service.running_gateway import running_gateway

CAPITALS = """
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from prorl.envs.base import BaseEnv, tool
from prorl.envs.settings import PromptSettings
from prorl.rubric import Rubric, reward


@reward("exact")
def exact(task, artifact):
    settings = CapitalsSettings.of(task)
    answer = artifact.decode()
    return settings.worth * float(answer.casefold() == task.data["answer"].casefold())


@dataclass(frozen=True, kw_only=True)
class CapitalsSettings(PromptSettings):
    worth: Annotated[float, Meta(gt=0, le=1)] = 1.0
    facts: tuple[str, ...] = ()

    def __post_init__(self):
        super().__post_init__()
        if "x" in self.facts:
            raise ValueError("x is no fact")


class Capitals(BaseEnv):
    name = "capitals"
    settings = CapitalsSettings
    system = "Answer with one word."
    needs = ("answer",)
    rubric = Rubric((exact, 1.0))

    @tool("Look up a word.", word={"type": "string"})
    def look_up(self, task, word):
        return "nothing"


class Undecorated(Capitals):
    class settings(PromptSettings):
        worth: float = 1.0
"""
GSM8K = {"question": "Half of 48?", "answer": "48/2 = <<48/2=24>>24\n#### 24"}


@pytest.fixture
def capitals(tmp_path: Path) -> str:
    path = tmp_path / "capitals.py"
    path.write_text(CAPITALS)
    return str(path)


WRONG = [
    ("math?answer_format=box", "`answer_format` = 'box'; expected one of any, boxed, last_line"),
    ("math?grading=lenient", "`grading` = 'lenient'; expected one of strict, closed_form, value"),
    ("math?gradin=strict", "unknown setting 'gradin'; expected .*; did you mean 'grading'?"),
    ("math?tools=pythn", "unknown tool 'pythn'; expected one of .*; did you mean 'python'?"),
    ("math?tools=[1]", r"`tools` = \[1\]; expected a list of texts or text"),
    ("math?tools=bash,bash", "`tools` = 'bash,bash'; expected different names of tools"),
    ("math?system=42", "`system` = 42; expected text"),
    ("math?system=a&system=b", "expected KEY=VALUE, each key once, with & between them; write &"),
    ("math?tools", "expected KEY=VALUE, each key once"),
    ("auto?tools=none", "expected the name of an env before its settings"),
    ("code?partial=yes", "`partial` = 'yes'; expected true or false"),
    ("swe?tools=none", "`tools` = none for the env 'swe'; expected at least one tool that runs"),
    ("guest?system=x", "unknown setting 'system'; expected no settings"),
    ({"math": "strict"}, r"`env` has 'math': 'strict'; expected NAME\?KEY=VALUE&"),
    (["math"], r"`env` = \['math'\]; expected NAME\?KEY=VALUE&"),
    ("CAPITALS:Capitals?worth=2", "`worth` = 2; expected a number, more than 0, at most 1"),
    ("CAPITALS:Capitals?facts=4", "`facts` = 4; expected a list of texts"),
    ('CAPITALS:Capitals?facts=["x"]', "x is no fact"),
    ("CAPITALS:Capitals?tools=lookup", "unknown tool 'lookup'"),
    ("CAPITALS:Undecorated?worth=1", "write @dataclass\\(frozen=True, kw_only=True\\) above it"),
]


async def check_all(value: Json) -> None:
    for name, values in env_settings.read(value).items():
        await check_settings_of(name, values)


@pytest.mark.parametrize(("value", "words"), WRONG)
async def test_a_wrong_setting_is_refused_in_a_single_line(
    capitals: str, value: Json, words: str
) -> None:
    value = value.replace("CAPITALS", capitals) if isinstance(value, str) else value
    with pytest.raises((ConfigError, TaskError), match=words) as error:
        await check_all(value)
    assert len(str(error.value).splitlines()) == 1


async def test_a_service_refuses_it_before_the_run_exists(tmp_path: Path, capitals: str) -> None:
    async with running_gateway(tmp_path) as w:
        for env, words in [
            ("math?grading=lenient", "expected one of strict, closed_form, value"),
            ({"name": "math", "system": 4}, "settings of the env 'math': `system` = 4"),
            (f"{capitals}:Capitals?worth=1", "names code, which this service does not load"),
            ("math?tools", "KEY=VALUE, each key once"),
        ]:
            status, answer = await w.http("POST", "/v1/runs", {"run_id": "r", "env": env})
            assert (status, words in answer["message"]) == (422, True), answer
            assert not (tmp_path / "root" / "r").exists()
        body = {"run_id": "r", "env": {"name": "math", "tools": [], "grading": "strict"}}
        assert (await w.http("POST", "/v1/runs", body))[0] == 201
        # The same settings in another form are the same run.
        again = {"run_id": "r", "env": {"math": {"tools": [], "grading": "strict"}}}
        assert (await w.http("POST", "/v1/runs", again))[0] == 200
        row = {"task_id": "t", "env": "math", "prompt": "?", "data": {"answer": "1"}}
        own = {"settings": {"grading": "value"}, "answer": "1"}
        groups = [{"task": row, "key": "a"}, {"task": {**row, "data": own}, "key": "b"}]
        assert (await w.http("POST", "/v1/runs/r/groups", {"groups": groups}))[0] in (200, 202)
        accepted = w.core.run("r").groups.values()
        stored_settings = [task_from_json(group.task).data["settings"] for group in accepted]
        common = {"tools": [], "grading": "strict"}
        assert stored_settings == [common, {**common, "grading": "value"}]
        assert len({group.digest for group in accepted}) == 2
        # The same group once more adds nothing: its task gets the same settings.
        assert (await w.http("POST", "/v1/runs/r/groups", {"groups": groups}))[0] in (200, 202)
        assert len(w.core.run("r").groups) == 2


async def test_a_users_env_reads_its_settings(tmp_path: Path, capitals: str) -> None:
    rows = tmp_path / "rows.jsonl"
    row = {"task_id": "t", "env": "x", "prompt": "Capital of Norway?", "data": {"answer": "Oslo"}}
    rows.write_bytes(orjson.dumps(row))
    (task,) = load_tasks(rows, f"{capitals}:Capitals?worth=0.5&tools=none&system=Shout.")
    env = await open_env(env_by_name, task)
    assert env.tools(task) == ()
    assert [message.content for message in env.messages(task)] == ["Shout.", task.prompt]
    assert env.sandbox(task, Stage.RUN) is None
    from prorl.limits import Deadline

    assert (await env.score(task, b"oslo", None, Deadline(60))).reward == 0.5
    bad = make_task(f"{capitals}:Capitals", answer="Oslo", settings={"worth": 3})
    with pytest.raises(TaskError, match=r"data\.settings: `worth` = 3; expected a number"):
        await open_env(env_by_name, bad)


def test_tools_name_what_an_env_offers() -> None:
    for tools, names in [
        ("none", []),
        (["price"], ["price"]),
        ("python", ["python"]),
        (["price", "bash"], ["price", "bash"]),
        (None, ["price", "python"]),
    ]:
        task = make_task("shop", settings={"tools": tools})
        assert [tool.name for tool in env_by_name("shop").tools(task)] == names


async def test_an_excluded_tool_is_not_run() -> None:
    from prorl.types import ToolCall

    task = make_task("shop", prices={"egg": 3}, settings={"tools": "python"})
    result = await env_by_name("shop").call(task, None, ToolCall("price", {"item": "egg"}), 60.0)
    assert result.exit_code == 2
    assert "3" not in result.output


def test_plain_mathematics_by_a_single_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without tools, with a system prompt of a file; read back from what the run stored."""
    monkeypatch.chdir(tmp_path)
    Path("gsm8k.jsonl").write_bytes(orjson.dumps(GSM8K))
    Path("prompt.txt").write_text("Think & answer.\nBox it.")
    env = "math?tools=none&answer_format=boxed&system=@prompt.txt"
    command = ["run", "--tasks", "gsm8k.jsonl", "--env", env, "--name", "plain", "-q"]
    assert dispatch([*command, "--root", "root"]) == 0
    run = StoredRun("root/plain")
    settings = {
        "tools": "none",
        "answer_format": "boxed",
        "system": "Think & answer.\nBox it.",
    }
    assert run.manifest["config"]["env"] == {"math": settings}
    assert run.manifest["config"]["tools"] == []
    (task,) = run.read("tasks", ["task"])["task"].to_pylist()
    assert task_from_json(task).data["settings"] == settings
    messages = run.sql("select role, content, tool_calls from messages order by index").to_pylist()
    assert [row["role"] for row in messages[:3]] == ["system", "user", "assistant"]
    assert messages[0]["content"] == settings["system"]
    assert messages[2]["content"].endswith(r"\boxed{24}")
    assert run.sql("select avg(reward) as r from rollouts").to_pylist() == [{"r": 1.0}]
    assert dispatch(["run", "--resume", "plain", "--root", "root", "-q"]) == 0


def test_settings_of_a_file_and_of_several_envs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("env.yaml").write_text("name: math\ntools: []\nsystem: |\n  Be brief.\n")
    Path("gsm8k.jsonl").write_bytes(orjson.dumps(GSM8K))
    flags: dict[str, Json] = {"tasks": "gsm8k.jsonl", "env": "env.yaml"}
    plan = JobPlan.make(None, flags, [], root=tmp_path / "root")
    assert plan.run.env == {"math": {"tools": [], "system": "Be brief.\n"}}
    assert plan.tasks[0].data["settings"] == plan.run.env["math"]
    both = {"arith": {"tools": []}, "shop": {"tools": ["price"]}}
    flags = {"tasks": "arith:train?n=1,shop:train?n=1", "env": both}
    plan = JobPlan.make(None, flags, [], root=tmp_path / "root")
    assert [task.data["settings"] for task in plan.tasks] == list(both.values())
    with pytest.raises(ConfigError, match="of the env 'shop', which no task of arith:train"):
        JobPlan.make(None, {**flags, "tasks": "arith:train?n=1"}, [], root=tmp_path / "root")
    with pytest.raises(ConfigError, match=r"`run\.env` has no effect .*--env, says it"):
        JobPlan.make(None, flags, ["run.env=math?tools=none"], root=tmp_path / "root")
    with pytest.raises(ConfigError, match=r"@no\.txt: No such file"):
        JobPlan.make(None, {**flags, "env": "math?system=@no.txt"}, [], root=tmp_path / "root")


def test_the_manifest_and_the_rows_name_the_code_of_a_users_env(
    tmp_path: Path, capitals: str
) -> None:
    row = {"task_id": "t", "env": f"{capitals}:Capitals", "prompt": "?", "data": {"answer": "yes"}}
    (tmp_path / "rows.jsonl").write_bytes(orjson.dumps(row))
    env = f"{capitals}:Capitals"
    command = ["run", "--tasks", str(tmp_path / "rows.jsonl"), "--policy", "noop", "-q"]
    root = ["--root", str(tmp_path / "root"), "--env", f"{env}?tools=none"]
    digest = hashlib.sha256(CAPITALS.encode()).hexdigest()
    dispatch([*command, *root, "--name", "first"])
    run = StoredRun(tmp_path / "root/first")
    assert run.manifest["users_code"] == {env: digest}
    assert run.sql("select env_sha256 as d from rollouts").to_pylist() == [{"d": digest}]
    edited = f"{CAPITALS}\n# edited"
    Path(capitals).write_text(edited)
    dispatch([*command, *root, "--name", "second"])
    digest = hashlib.sha256(edited.encode()).hexdigest()
    run = StoredRun(tmp_path / "root/second")
    assert run.sql("select env_sha256 as d from rollouts").to_pylist() == [{"d": digest}]
