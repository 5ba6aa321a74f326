"""Guests: programs of another interpreter that play against the model endpoint and say the
reward.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from prorl.agents import get_agent
from prorl.agents.context import AttemptContext
from prorl.agents.guest_broker import GuestBroker
from prorl.envs import get_env
from prorl.errors import RolloutError, TaskError
from prorl.limits import Deadline
from prorl.linux.procfs import descendants
from prorl.service.submissions import check_env_exists
from prorl.testing import Replies, Reply, make_task, play
from prorl.types import FailureCode, RolloutLimits, Task
from tests.agents.test_native import context

ASK = """
import json, os, sys, urllib.request
task = json.load(open(os.environ["PRORL_TASK"]))
def ask(text, key=os.environ["OPENAI_API_KEY"]):
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": text}]}).encode()
    head = {"authorization": "Bearer " + key}
    ask = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, head)
    return json.load(urllib.request.urlopen(ask))["choices"][0]["message"]["content"]
def leave(**parts):
    json.dump(parts, open("reward.json", "w"))
"""
PATH = "os.environ['OPENAI_BASE_URL'] = os.environ['OPENAI_BASE_URL'].replace('v1', "
GRADE = "leave(reward=float(ask(task['prompt']) == task['data']['answer']), seen=1)"


def guest(script: str) -> Task:
    argv = [sys.executable, "-c", ASK + script]
    return make_task("guest", "Half of 48?", argv=argv, answer="24")


def guest_folders() -> set[str]:
    return {path.name for path in Path(tempfile.gettempdir()).glob("prorl-guest-*")}


@pytest.mark.parametrize(("answer", "reward"), [("24", 1.0), ("42", 0.0)])
async def test_a_right_answer_earns_1_and_a_wrong_answer_0(answer: str, reward: float) -> None:
    played = await play(get_env("guest"), guest(GRADE), Replies(answer))
    assert played.reward == reward
    assert {part.name: part.weight for part in played.score.parts} == {"reward": 1.0, "seen": 0.0}
    assert len(played.trajectory.turns) == 1


@pytest.mark.parametrize(
    ("script", "code", "words"),
    [
        ("ask('x'); sys.exit('broken')", "eval_failed", "exit status 1: broken"),
        ("ask('x')", "eval_failed", "no reward.json"),
        ("open('reward.json', 'w').write('{')", "eval_failed", "reward.json"),
        ("leave(reward=float('nan'))", "eval_failed", "reward.json"),
        ("leave(score=1)", "eval_failed", "no finite number `reward`"),
        ("leave(failed='task', message='no such level')", "bad_task", "no such level"),
        ("leave(reward=0.5)", "bad_task", "no model call .* left a reward of 0.5"),
        ("os.kill(os.getpid(), 9)", "eval_failed", "exit status -9"),
        ("ask('x'); leave(reward=1.0); sys.exit(3)", "eval_failed", "exit status 3"),
        ("ask('x', key='another')", "eval_failed", "HTTP Error 401"),
        (f"{PATH}'another/v1'); ask('x')", "eval_failed", "HTTP Error 401"),
    ],
)
async def test_its_own_failure_is_nobodys_reward(script: str, code: str, words: str) -> None:
    with pytest.raises(RolloutError, match=words) as caught:
        await play(get_env("guest"), guest(script), Replies("24"))
    assert caught.value.code == code


async def test_a_key_may_stand_in_the_address() -> None:
    script = f"{PATH} os.environ['OPENAI_API_KEY'] + '/v1')\nask.__defaults__ = ('EMPTY',)\n{GRADE}"
    assert (await play(get_env("guest"), guest(script), Replies("24"))).reward == 1.0


async def test_the_last_word_counts_and_what_it_started_ends_with_it() -> None:
    script = (
        "import subprocess; p = subprocess.Popen(['sleep', '999'], start_new_session=True)\n"
        "print(p.pid); ask('x'); leave(reward=0); leave(reward=1)"
    )
    before = guest_folders()
    played = await play(get_env("guest"), guest(script), Replies("24"))
    assert played.reward == 1.0
    assert not Path(f"/proc/{played.trajectory.messages[-1].content}").exists()
    assert guest_folders() == before


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_two_hundred_at_once_of_which_some_die_hang_up_and_say_it_twice() -> None:
    """Each has a model endpoint of its own; what one does is nobody else's."""
    scripts = (
        (GRADE, "24", 1.0),
        (GRADE, "42", 0.0),
        ("ask('x'); os.kill(os.getpid(), 9)", "24", None),
        (f"leave(reward=0); {GRADE}", "24", 1.0),
        (
            "from threading import Thread; ts = [Thread(target=ask, args='x') for _ in '123']\n"
            "for t in ts: t.start()\nfor t in ts: t.join()\nleave(reward=0.5)",
            "24",
            0.5,
        ),
    )
    before, guest_broker = guest_folders(), GuestBroker()

    async def reward_of(number: int) -> float | str | None:
        script, reply, _ = scripts[number % len(scripts)]
        made = attempt(guest(script), reply, reply, reply, turns=3)
        made.guest_broker = guest_broker
        trajectory = await get_agent("guest").run(made)
        if trajectory.failure.code is FailureCode.NONE:
            env = get_env("guest")
            return (await env.score(made.task, trajectory.artifact, None, Deadline(9))).reward
        code = trajectory.failure.code
        return None if code is FailureCode.EVAL_FAILED else str(trajectory.failure)

    rewards = await asyncio.gather(*map(reward_of, range(200)))
    assert rewards == [scripts[number % len(scripts)][2] for number in range(200)]
    assert guest_folders() == before


async def test_while_it_waits_for_its_turn_its_time_stands_still() -> None:
    """The attempts before it hang; it has less time than they take."""
    guest_broker, first = GuestBroker(), guest("import time; time.sleep(999)")
    hung = [attempt(first, run_s=3.0) for _ in range(2 * (os.cpu_count() or 1))]
    last = attempt(guest(GRADE), "24", run_s=2.9)
    for made in (*hung, last):
        made.guest_broker = guest_broker
    played = await asyncio.gather(*map(get_agent("guest").run, (*hung, last)))
    codes = [each.failure.code for each in played]
    assert codes == [FailureCode.EVAL_FAILED] * len(hung) + [FailureCode.NONE]


def attempt(task: Task, *replies: Reply, run_s: float = 60.0, turns: int = 2) -> AttemptContext:
    limits = RolloutLimits(run_s=run_s, max_turns=turns)
    made = context(Replies(*replies), get_env("guest"), limits)
    made.task, made.deadline = task, Deadline(run_s)
    return made


@pytest.mark.parametrize(
    ("script", "run_s", "code"),
    [
        ("import time; time.sleep(999)", 2.0, "eval_failed"),  # it hangs: nobody's
        ("ask('x'); ask('y'); ask('z')", 60.0, "max_turns"),  # the policy's budget: the policy's
    ],
)
async def test_an_exhausted_time_or_turn_budget_decides_the_failure_code(
    script: str, run_s: float, code: str
) -> None:
    before = set(descendants(os.getpid()))
    trajectory = await get_agent("guest").run(attempt(guest(script), "a", "b", "c", run_s=run_s))
    assert trajectory.failure.code == code, trajectory.failure.message
    if trajectory.failure.failure_class.trains:
        made = await get_env("guest").score(guest(""), trajectory.artifact, None, Deadline(9))
        assert made.reward == 0.0
    assert set(descendants(os.getpid())) <= before


async def test_a_cancel_ends_it_in_the_middle_of_a_call() -> None:
    made, before = attempt(guest(GRADE), None), set(descendants(os.getpid()))
    assert isinstance(made.backend, Replies)
    running = asyncio.ensure_future(get_agent("guest").run(made))
    await made.backend.waiting.wait()
    made.cancelled = lambda: True
    running.cancel()
    assert (await running).failure.code is FailureCode.CANCELLED
    assert set(descendants(os.getpid())) <= before


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_it_ends_with_its_worker_however_that_dies(number: signal.Signals) -> None:
    """The worker is a process that plays a guest which never ends, and says that guest's pid."""
    worker = (
        "import asyncio, sys; from tests.agents.test_guest import *\n"
        'script = \'import time; print(os.getpid(), file=open(task["data"]["pid"], "w")); \''
        '\'os.rename(task["data"]["pid"], task["data"]["pid"] + "!"); time.sleep(999)\'\n'
        "task = guest(script); task.data['pid'] = sys.argv[1]\n"
        "asyncio.run(get_agent('guest').run(attempt(task)))"
    )
    before = guest_folders()
    with tempfile.TemporaryDirectory() as folder:
        pid_file = Path(folder) / "pid!"
        with subprocess.Popen([sys.executable, "-c", worker, str(pid_file)[:-1]]) as process:
            while not pid_file.exists():
                assert process.poll() is None
                signal.sigtimedwait([], 0.05)
            process.send_signal(number)
        pid = Path(f"/proc/{pid_file.read_text().strip()}")
        while pid.exists() or guest_folders() - before:
            signal.sigtimedwait([], 0.05)


def test_a_bad_row_and_a_service_that_loads_no_code_refuse_it() -> None:
    with pytest.raises(TaskError, match="argv"):
        get_env("guest").check(make_task("guest", argv="python"))
    with pytest.raises(TaskError, match="load_code"):
        check_env_exists(load_code=False)(guest(GRADE), lambda env, messages, tools: None)
    assert check_env_exists(load_code=True)(guest(GRADE), lambda env, messages, tools: None) is None
