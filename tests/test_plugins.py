"""Users' envs and agents by entry point: found, preferred after ours, and refused in one line when
they are broken.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from types import ModuleType

import pytest

from prorl.agents import get_agent
from prorl.agents.users import UsersAgent
from prorl.envs import get_env
from prorl.envs.math import MathEnv
from prorl.errors import ConfigError, RolloutError, TaskError, ToolError, boundary
from prorl.states import FailureCode
from prorl.tasks import load_tasks
from tests.user_package import installed

TRIVIA = """
    from prorl.envs.noop import NoopEnv

    class Trivia(NoopEnv):
        name = "trivia"

        def fall(self):
            raise KeyError("x")

    class Broken:
        def __init__(self):
            raise RuntimeError("no licence")
"""


@pytest.fixture(autouse=True)
def _package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    files = {"trivia/__init__.py": TRIVIA, "trivia/sick.py": "import nothing_of_this_name"}
    envs = {
        "trivia": "trivia:Trivia",
        "math": "trivia:Trivia",
        "sick": "trivia.sick:X",
        "gone": "trivia:Gone",
        "broken": "trivia:Broken",
    }
    with installed(
        tmp_path,
        "trivia",
        files,
        {"prorl.envs": envs, "prorl.agents": {"driver": "trivia:Trivia"}},
        monkeypatch,
    ):
        yield


def test_a_users_plugin_is_loaded_by_its_name_and_ours_win() -> None:
    assert get_env("trivia").name == "trivia"
    assert isinstance(get_agent("driver"), UsersAgent), "its code is imported in a helper alone"
    assert isinstance(get_env("math"), MathEnv)


def test_what_users_code_raises_is_its_own_doing_and_says_where() -> None:
    """An error that a task format or a sandbox kind raises is no failure of ours."""
    trivia = get_env("trivia")
    with (
        pytest.raises(
            RolloutError, match=r"agent loop: KeyError: 'x' \(\S+trivia/\S+py:\d+ in"
        ) as caught,
        boundary(RolloutError, FailureCode.STAGE_ERROR, "agent loop"),
    ):
        trivia.fall()  # type: ignore[attr-defined]
    assert caught.value.code == FailureCode.BAD_TASK
    with (
        pytest.raises(ToolError, match=r"a tool: KeyError: 'y'$") as caught,
        boundary(ToolError, FailureCode.STAGE_ERROR, "a tool"),
    ):
        raise KeyError("y")
    assert caught.value.code == FailureCode.STAGE_ERROR


def test_an_unknown_name_names_the_nearest_of_all() -> None:
    with pytest.raises(
        TaskError, match=r"unknown env 'trivai'.*code.*trivia.*did you mean 'trivia'\?"
    ):
        get_env("trivai")
    with pytest.raises(
        ConfigError,
        match=(
            r"unknown agent 'xyzzy'; expected one of aider, .*driver, .*native, .*"
            r" register your own .*prorl.agents"
        ),
    ):
        get_agent("xyzzy")
    with pytest.raises(ConfigError, match=r"name the class .* of the file: 'careful.py:NAME'$"):
        get_agent("careful.py")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "sick",
            (
                "env 'sick' cannot be imported from trivia.sick:X: ModuleNotFoundError: No module"
                " named 'nothing_of_this_name'"
            ),
        ),
        ("gone", "env 'gone' cannot be imported from trivia:Gone: AttributeError"),
        ("broken", "env 'broken' cannot be made: RuntimeError: no licence"),
    ],
)
def test_a_part_that_cannot_be_used_is_the_users_error_and_names_the_cause(
    name: str, text: str
) -> None:
    with pytest.raises(TaskError, match=text):
        get_env(name)


def _file(folder: Path, text: str = "") -> Path:
    path = folder / "mine.py"
    path.write_text(
        text
        or "import helper\nfrom prorl.envs.noop import NoopEnv as Base\n"
        "class Mine(Base):\n    name = helper.NAME\n"
    )
    (folder / "helper.py").write_text("NAME = 'mine'\n")
    return path


def test_a_place_is_a_name_and_a_file_may_import_its_neighbours(tmp_path: Path) -> None:
    path = _file(tmp_path)
    env = get_env(f"{path}:Mine")
    assert env.name == "mine"
    assert type(get_env(f"{path}:Mine")) is type(env)
    assert type(get_env("prorl.envs.noop:NoopEnv")).__name__ == "NoopEnv"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("nowhere.py:Mine", r"env '.*nowhere.py:Mine' cannot be imported: FileNotFoundError"),
        (
            "mine.py:Other",
            r"cannot be imported: AttributeError: .*mine.py has no attribute 'Other'; mend",
        ),
        ("mine.py:Mini", r"mine.py has no attribute 'Mini'; did you mean 'Mine'\?"),
        ("broken.py:Mine", r"cannot be imported: ZeroDivisionError"),
        ("plain.py:Mine", r"has no check, .*derive it from prorl.envs.base.BaseEnv"),
        ("asks.py:Mine", r"cannot be made: TypeError: .*; mend it there"),
    ],
)
def test_a_place_without_a_part_is_the_users_error(tmp_path: Path, name: str, text: str) -> None:
    _file(tmp_path)
    (tmp_path / "broken.py").write_text("1 / 0")
    (tmp_path / "plain.py").write_text("class Mine: pass")
    (tmp_path / "asks.py").write_text("def Mine(task): pass")
    for _ in range(2):
        with pytest.raises(TaskError, match=text):
            get_env(f"{tmp_path}/{name}")


def test_a_row_names_a_file_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, tasks = _file(tmp_path), tmp_path / "tasks.jsonl"
    tasks.write_text('{"task_id": "a", "env": "mine.py:Mine", "prompt": "p"}\n')
    assert [task.env for task in load_tasks(tasks)] == [f"{path}:Mine"]
    monkeypatch.chdir(tmp_path)
    assert [task.env for task in load_tasks(tasks, env="mine.py:Mine")] == [f"{path}:Mine"]
    assert [task.env for task in load_tasks(tasks, env="math")] == ["math"]


def test_siblings_that_import_a_file_at_once_all_get_its_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RUN loads a run's agent in threads, one a rollout."""
    meeting = ModuleType("meeting")
    begun, second = Event(), Event()
    monkeypatch.setitem(sys.modules, "meeting", meeting)
    meeting.__dict__.update(begun=begun, second=second)
    file = tmp_path / "slow.py"
    file.write_text(
        "import meeting\nfrom prorl.envs.noop import NoopEnv\n"
        "meeting.begun.set()\nmeeting.second.wait(0.3)\nclass Slow(NoopEnv): name = 'slow'\n"
    )

    def load() -> str:
        try:
            return get_env(f"{file}:Slow").name
        finally:
            second.set()

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(load)
        assert begun.wait(20)
        assert [pool.submit(load).result(20), first.result(20)] == ["slow", "slow"]
