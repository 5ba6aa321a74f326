"""Users' envs in helpers: each hook that blocks, raises, exits, eats memory or forks, and all else.

What their code does wrong is a failure of the task, in its own words and with its line.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from prorl.envs import get_env, users
from prorl.envs.users import UsersEnv, env_by_name, open_env, reference_of, users_code
from prorl.errors import GraderError, RolloutError, TaskError
from prorl.helper.pool import close, pool
from prorl.limits import Deadline
from prorl.protocols import CachedWorkspace, SupportsTaskVerification
from prorl.testing import LocalSandbox, make_task, play, scripted
from prorl.types import FailureCode, Json, Stage, Task, ToolCall
from tests.waiting import wait_until

ENV = """
import asyncio, os, time
from prorl.envs.base import BaseEnv, Solution, tool
from prorl.envs.tools import BASH
from prorl.errors import FencedError, GraderError, RolloutError, StorageError
from prorl.rubric import Rubric, reward
from prorl.types import FailureCode, ToolCall

def misbehave(task, hook):
    if task.data.get("hook") != hook:
        return
    how = task.data["how"]
    if how == "block":
        time.sleep(600)
    if how == "spin":
        while True: pass
    if how == "raise":
        raise LookupError(f"no such city in {hook}")
    if how == "exit":
        os._exit(7)
    if how == "leave":
        raise SystemExit("enough")
    if how == "eat":
        bytearray(64 << 30)
    if how == "fork":
        os.fork()
    if how == "say":
        raise GraderError(FailureCode.GRADER_ERROR, "the judge is away")
    if how == "FencedError":
        raise FencedError("not yours")
    if how == "StorageError":
        raise StorageError("no room")
    if how == "RolloutError":
        raise RolloutError("a word", "of their own")

@reward("exact")
def exact(task, artifact):
    misbehave(task, "score")
    if "gives" in task.data:
        return eval(task.data["gives"])
    return float(artifact == b"yes")

class Mine(BaseEnv):
    name = "mine"
    system = "Be short."
    offers = (BASH,)
    rubric = Rubric((exact, 1.0))
    repeatable = ("shout",)

    def check(self, task):
        misbehave(task, "check")
        super().check(task)

    def messages(self, task):
        misbehave(task, "messages")
        return super().messages(task)

    def tools(self, task):
        misbehave(task, "tools")
        return super().tools(task)

    def sandbox(self, task, stage):
        misbehave(task, "sandbox")
        return super().sandbox(task, stage)

    async def prepare(self, task, sandbox):
        misbehave(task, "prepare")
        await sandbox.put("hello", 5 if task.data.get("how") == "nonsense" else b"world")

    @tool("Louder.", word={"type": "string"})
    def shout(self, task, word):
        misbehave(task, "call")
        return word.upper()

    async def artifact(self, task, final, sandbox):
        misbehave(task, "artifact")
        return final.encode()

    def reference(self, task):
        misbehave(task, "reference")
        calls = ToolCall("shout", {"word": "a"}), ToolCall("bash", {"command": "cat hello"})
        return Solution(calls, "yes")
"""

PLANNED = ("check", "messages", "tools", "sandbox")
HOOKS = (*PLANNED, "prepare", "call", "artifact", "score", "reference")


@pytest.fixture(autouse=True)
async def _short(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> AsyncIterator[None]:
    """Short limits where a hook blocks; elsewhere a busy machine may need longer for a start."""
    case = getattr(request.node, "callspec", None)
    if case is None or case.params.get("how") == "block":
        for name in ("HOOK_S", "CALL_GRACE_S", "ARTIFACT_S"):
            monkeypatch.setattr(users, name, 1.5)
        monkeypatch.setattr(users, "SCORE_GRACE_S", 0.0)
    monkeypatch.setattr(users, "LEAD_S", 1.5)
    yield
    close()


def _task(folder: Path, **data: Json) -> Task:
    (folder / "mine.py").write_text(ENV)
    return make_task(f"{folder}/mine.py:Mine", "Shout.", **data)


async def _open(task: Task, how: str = "block") -> UsersEnv:
    env = await open_env(env_by_name, task, 3.0 if how == "block" else 60.0)
    assert isinstance(env, UsersEnv)
    return env


async def _hook(env: UsersEnv, task: Task, hook: str, sandbox: LocalSandbox) -> object:
    limit_s = 1.5 if task.data.get("how") == "block" else 30.0
    if hook == "prepare":
        await env.prepare(task, sandbox)
        return None
    if hook == "call":
        return await env.call(task, sandbox, ToolCall("shout", {"word": "a"}), limit_s)
    if hook == "artifact":
        return await env.artifact(task, "yes", sandbox)
    if hook == "score":
        return (await env.score(task, b"yes", None, Deadline(limit_s))).reward
    return await reference_of(env, task)


SAYS = {
    "block": r"longer than",
    "raise": r"LookupError: no such city in {hook}",
    "exit": r"exit code 7",
    "leave": r"SystemExit: enough",
    "eat": r"MemoryError",
}
CASES = [(hook, how) for hook in HOOKS for how in ("block", "raise", "exit")]
CASES += [(hook, how) for hook in ("check", "score") for how in ("leave", "eat")]


@pytest.mark.parametrize(("hook", "how"), CASES)
async def test_a_hook_that_misbehaves_fails_the_task_with_its_words_and_line(
    hook: str, how: str, tmp_path: Path
) -> None:
    task = _task(tmp_path, hook=hook, how=how)
    words = SAYS[how].format(hook=hook)
    where = "" if how == "exit" else r".*mine\.py:\d+ in \w+"
    if hook in PLANNED:
        with pytest.raises(TaskError, match=words + where):
            await _open(task)
    else:
        env = await _open(task, how)
        with pytest.raises((TaskError, RolloutError), match=words + where) as caught:
            await _hook(env, task, hook, LocalSandbox(tmp_path))
        code = FailureCode.GRADER_ERROR if hook == "score" else FailureCode.BAD_TASK
        assert not isinstance(caught.value, RolloutError) or caught.value.code is code
        if (hook, how) == ("score", "raise"):
            assert isinstance(caught.value, GraderError)
            assert "Traceback" in caught.value.log
            assert 'raise LookupError(f"no such city in {hook}")' in caught.value.log
    good = _task(tmp_path)
    assert await _hook(await _open(good), good, "score", LocalSandbox(tmp_path)) == 1.0


@pytest.mark.parametrize("hook", ["check", "call", "score"])
async def test_a_hook_that_forks_answers_once(hook: str, tmp_path: Path) -> None:
    task = _task(tmp_path, hook=hook, how="fork")
    env = await _open(task)
    if hook not in PLANNED:
        await _hook(env, task, hook, LocalSandbox(tmp_path))
    assert await _hook(env, task, "score", LocalSandbox(tmp_path)) == 1.0


@pytest.mark.parametrize("gives", ["float('nan')", "float('inf')", "'1.0'", "None", "[1.0]"])
async def test_a_reward_that_is_no_number_is_the_tasks_mistake(gives: str, tmp_path: Path) -> None:
    task = _task(tmp_path, gives=gives)
    env = await _open(task)
    with pytest.raises(RolloutError, match=r"exact gave .*; expected a finite number") as caught:
        await env.score(task, b"yes", None, Deadline(5.0))
    assert caught.value.code is FailureCode.BAD_TASK


async def test_an_error_that_wants_another_try_keeps_its_code(tmp_path: Path) -> None:
    task = _task(tmp_path, hook="score", how="say")
    env = await _open(task)
    with pytest.raises(RolloutError, match="the judge is away") as caught:
        await env.score(task, b"yes", None, Deadline(5.0))
    assert caught.value.code is FailureCode.GRADER_ERROR


@pytest.mark.parametrize("hook", ["prepare", "call", "artifact", "score"])
@pytest.mark.parametrize("how", ["FencedError", "StorageError", "RolloutError"])
async def test_an_error_of_ours_that_a_hook_raises_is_the_tasks_mistake(
    hook: str, how: str, tmp_path: Path
) -> None:
    task = _task(tmp_path, hook=hook, how=how)
    env = await _open(task, how)
    with pytest.raises((TaskError, RolloutError)) as caught:
        await _hook(env, task, hook, LocalSandbox(tmp_path))
    code = FailureCode.GRADER_ERROR if hook == "score" else FailureCode.BAD_TASK
    assert not isinstance(caught.value, RolloutError) or (caught.value.code is code)


async def test_a_whole_rollout(tmp_path: Path) -> None:
    task = _task(tmp_path)
    env = await _open(task)
    played = await play(env, task, scripted("oracle", env))
    assert (played.reward, played.outputs) == (1.0, ["A", "world"])
    assert (await play(env, task, scripted("noop", env))).reward == 0.0
    assert env.sandbox(task, Stage.EVAL) is None
    assert not isinstance(env, CachedWorkspace | SupportsTaskVerification)


async def test_repeatable_tools_are_listed_by_the_env_in_its_helper(tmp_path: Path) -> None:
    env = await _open(_task(tmp_path))
    assert await env.repeats(ToolCall("bash", {}))
    assert await env.repeats(ToolCall("shout", {}))


async def test_a_lost_sandbox_is_not_the_users_fault(tmp_path: Path) -> None:
    class LostSandbox(LocalSandbox):
        async def put(self, path: str, content: bytes, mode: int = 0o644) -> None:
            raise RolloutError(FailureCode.SANDBOX_LOST, "gone")

    class Slow(LocalSandbox):
        async def put(self, path: str, content: bytes, mode: int = 0o644) -> None:
            await asyncio.sleep(60)

    task = _task(tmp_path)
    with pytest.raises(RolloutError, match="gone") as caught:
        await (await _open(task)).prepare(task, LostSandbox(tmp_path))
    assert caught.value.code is FailureCode.SANDBOX_LOST
    with pytest.raises(RolloutError, match="longer than") as caught:
        await (await _open(task)).prepare(task, Slow(tmp_path))
    assert caught.value.code is FailureCode.STAGE_ERROR


async def test_a_nonsensical_request_of_a_sandbox_is_the_tasks_mistake(
    tmp_path: Path,
) -> None:
    # it has pickle take the causes of errors along
    pytest.importorskip("distributed", reason="the extra `dask` is not installed")
    sandbox = LocalSandbox(tmp_path)
    task = _task(tmp_path, hook="prepare", how="nonsense")
    for _ in range(2):
        with pytest.raises(RolloutError, match=r"sandbox\.put: .*(Type|Attribute)Error") as caught:
            await (await _open(task)).prepare(task, sandbox)
        assert caught.value.code is FailureCode.BAD_TASK
    good = _task(tmp_path)
    assert await _hook(await _open(good), good, "score", sandbox) == 1.0


async def test_text_that_is_no_utf8_chooses_no_failure(tmp_path: Path) -> None:
    task = _task(tmp_path)
    call = ToolCall("shout", {"word": "a\ud800"})
    result = await (await _open(task)).call(task, LocalSandbox(tmp_path), call, 60.0)
    assert result.output == "A?"


async def test_rollouts_that_wait_do_not_wait_for_each_other(tmp_path: Path) -> None:
    """Each ends only after all six have begun."""
    (meeting := tmp_path / "meeting").mkdir()
    (tmp_path / "slow.py").write_text(
        "import os, time\nfrom prorl.envs.noop import NoopEnv\n"
        "from prorl.rubric import Rubric, reward\n"
        "@reward('slow')\ndef slow(task, artifact):\n"
        f"    open(f'{meeting}/{{os.getpid()}}', 'x')\n"
        f"    while len(os.listdir('{meeting}')) < 6:\n        time.sleep(0.01)\n    return 1.0\n"
        "class Slow(NoopEnv):\n    rubric = Rubric((slow, 1.0))\n"
    )
    task = make_task(f"{tmp_path}/slow.py:Slow", "?")
    env = await open_env(env_by_name, task)
    await asyncio.gather(*(env.score(task, b"", None, Deadline(100.0)) for _ in range(6)))


async def test_an_import_takes_its_time_and_its_error_is_a_single_line(tmp_path: Path) -> None:
    (tmp_path / "late.py").write_text(
        "import time\ntime.sleep(3)\nfrom prorl.envs.noop import NoopEnv\n"
        "class Late(NoopEnv):\n    pass\n"
    )
    await open_env(env_by_name, make_task(f"{tmp_path}/late.py:Late"))
    (tmp_path / "broken.py").write_text("import no_such_module_anywhere\n")
    with pytest.raises(TaskError, match=r"cannot be imported.*no_such_module.*broken\.py:1"):
        await open_env(env_by_name, make_task(f"{tmp_path}/broken.py:E"))
    with pytest.raises(TaskError, match="did you mean 'math'"):
        await open_env(env_by_name, make_task("maht"))


def test_what_is_ours_runs_here() -> None:
    assert users_code(make_task("math", answer="1", tools=["bash"])) == ()
    assert users_code(make_task("math", answer="1", tools=["bash", "mine"])) == ("math", "mine")
    assert users_code(make_task("mine")) == ("mine",)


async def test_our_own_envs_do_not_run_in_helpers() -> None:
    task = make_task("math", answer="1")
    assert await open_env(get_env, task) is not None
    assert type(await open_env(env_by_name, task)).__name__ == "MathEnv"
    assert (await pool(users._EnvHelpers(("x",), task).program)).starts == 0


def test_a_helper_of_users_dies_with_its_loop(tmp_path: Path) -> None:
    task = _task(tmp_path)

    async def pid() -> int:
        env = await _open(task)
        return (await pool(env._helpers.program))._free[0][0].pid

    helper_pid = asyncio.run(pid())
    wait_until(lambda: not os.path.exists(f"/proc/{helper_pid}/root"))


REWARD = """
from prorl.envs.base import BaseEnv
from prorl.rubric import Rubric, reward

@reward("fixed")
def fixed(task, artifact):
    return VALUE

class Fixed(BaseEnv):
    name = "fixed"
    rubric = Rubric((fixed, 1.0))
"""


async def test_an_edited_file_is_another_program(tmp_path: Path) -> None:
    file = tmp_path / "fixed.py"
    task = make_task(f"{file}:Fixed", "x")

    async def opened(value: str) -> UsersEnv:
        file.write_text(REWARD.replace("VALUE", value))
        env = await open_env(env_by_name, task)
        assert isinstance(env, UsersEnv)
        return env

    async def reward_of(env: UsersEnv) -> float:
        return (await env.score(task, b"", None, Deadline(60.0))).reward

    first = await opened("1.0")
    assert await reward_of(first) == 1.0
    second = await opened("0.25")
    assert await reward_of(second) == 0.25
    assert await reward_of(first) == 1.0, "what was opened before keeps its code"


async def test_a_grader_that_raises_is_named_once_with_its_line_and_its_own_frames(
    tmp_path: Path,
) -> None:
    file = tmp_path / "raising.py"
    file.write_text(REWARD.replace("VALUE", "{}['no such key']"))
    env = await open_env(env_by_name, make_task(f"{file}:Fixed", "x"))
    with pytest.raises(GraderError) as caught:
        await env.score(make_task(f"{file}:Fixed", "x"), b"", None, Deadline(60.0))
    assert caught.value.message.count(f"({file}:7 in fixed)") == 1
    assert [line.split(",")[0] for line in caught.value.log.splitlines()] == [
        "Traceback (most recent call last):",
        f'  File "{file}"',
        "    return {}['no such key']",
        "KeyError: 'no such key'",
    ]


async def test_siblings_share_a_single_plan_and_a_failed_plan_is_made_again(
    tmp_path: Path,
) -> None:
    counts = tmp_path / "asked"
    noted = f"def messages(self, task):\n        open({str(counts)!r}, 'a').write('x')"
    code = tmp_path / "counting.py"
    code.write_text(ENV.replace("def messages(self, task):", noted))
    mine = f"{code}:Mine"
    task = make_task(mine, "?")
    envs = await asyncio.gather(*(open_env(env_by_name, task) for _ in range(4)))
    envs.append(await open_env(env_by_name, task))
    assert counts.read_text() == "x"
    assert len({tuple(map(str, env.messages(task))) for env in envs}) == 1
    await open_env(env_by_name, make_task(mine, "another?"))
    assert counts.read_text() == "xx"
    failing = make_task(mine, "?", hook="messages", how="raise")
    for _ in range(2):
        before = len(counts.read_text())
        with pytest.raises(TaskError):
            await open_env(env_by_name, failing)
        assert len(counts.read_text()) > before
