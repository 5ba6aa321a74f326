"""An agent of a user drives the policy from a helper: exact ids and resumption as for ours; what it
does wrong ends its own attempt, in its words, and leaves what had been sampled.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from prorl.agents import get_agent
from prorl.agents.context import AttemptContext
from prorl.agents.users import helper_program
from prorl.errors import BackendError, ConfigError
from prorl.helper.pool import pool
from prorl.journal import AttemptJournal
from prorl.linux.procfs import descendants
from prorl.testing import LocalSandbox, Replies
from prorl.types import (
    FailureCode,
    Lineage,
    Message,
    RolloutLimits,
    SpanKind,
    StopReason,
    ToolCall,
    Trajectory,
)
from tests.agents.test_native import ToolEnv, check_exact, context
from tests.agents.test_resume import CALLS, REPLIES, Log, Repeatable, check_same, journal_of
from tests.agents.two_turn_agent import AGAIN
from tests.waiting import until

AGENTS = """
import asyncio, ctypes, os, signal, sys, threading, time
from pathlib import Path
from prorl.states import Lineage
from prorl.types import Message, ToolCall

def user(text):
    return Message(role="user", content=text)

class Loop:
    async def run(self, attempt):
        return (await attempt.solve()).content

class Blocking:
    "A plain function, which returns nothing and samples nothing."
    def run(self, attempt):
        return f"{attempt.sample_index} {attempt.number} {attempt.seed > 0} {len(attempt.tools)}"

class Silent:
    async def run(self, attempt):
        await attempt.sample(attempt.messages)

class Many:
    "Two sub-agents side by side, a fork, and the main conversation."
    async def run(self, attempt):
        subs = [attempt.conversation() for _ in range(2)]
        said = await asyncio.gather(*(
            sub.sample([user(f"sub {n}")], tools=[], max_tokens=4 + n) for n, sub in enumerate(subs)
        ))
        main = attempt.conversation(Lineage.MAIN)
        await main.sample([user(" ".join(reply.content for reply in said))])
        branch = main.fork()
        await branch.sample([user("left")])
        return (await main.sample([user("right")])).content

class Sandboxed:
    async def run(self, attempt):
        await attempt.sandbox.put("a.txt", b"written")
        listed = await attempt.sandbox.exec(["cat", "a.txt"], 10.0)
        try:
            await attempt.sandbox.get("no.txt")
        except Exception as error:
            return f"{listed.output} {type(error).__name__}"

class Asks:
    async def run(self, attempt):
        await attempt.sample(attempt.messages)
        sin(attempt.task.prompt)
        return (await attempt.sample([user("again")])).content

class Once:
    "Its process is killed from outside after the first reply of its first incarnation."
    async def run(self, attempt):
        await attempt.sample(attempt.messages)
        mark = Path(attempt.task.prompt)
        if not mark.exists():
            mark.write_text("here")
            os.kill(os.getpid(), signal.SIGKILL)
        return (await attempt.sample([user("again")])).content

class Torn:
    "Its process is killed while it samples, in its first incarnation."
    async def run(self, attempt):
        mark = Path(attempt.task.prompt)
        if not mark.exists():
            mark.write_text("here")
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGKILL)).start()
        return (await attempt.sample(attempt.messages)).content

class Twice:
    "Two samples of one conversation at once."
    async def run(self, attempt):
        await asyncio.gather(*(attempt.sample([user(str(n))]) for n in range(2)))

class Stubborn:
    async def run(self, attempt):
        while True:
            try:
                await attempt.sample([user("more")])
            except BaseException:
                time.sleep(600)

class Number:
    def run(self, attempt):
        return 5

class Forged:
    async def run(self, attempt):
        await attempt.ask("sample", {"turn": "first"})

class NoRun:
    pass

def sin(how):
    if how == "spin":
        while True:
            pass
    if how == "sleep":
        time.sleep(600)
    if how == "exit":
        os._exit(3)
    if how == "leave":
        sys.exit("enough")
    if how == "raise":
        raise LookupError("no such city")
    if how == "crash":
        ctypes.string_at(0)
    if how == "eat":
        held = []
        while True:
            held.append(bytearray(64 << 20))
    if how == "close":
        os.closerange(3, 500)
    if how == "threads":
        for _ in range(20):
            threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
    if how == "fork" and os.fork() == 0:
        raise LookupError("in a fork")
    if how == "kill the parent":
        os.kill(os.getppid(), signal.SIGKILL)
    if how == "kill all":
        os.kill(-1, signal.SIGKILL)
    if how == "kill the group":
        os.killpg(os.getpgid(os.getppid()), signal.SIGKILL)
    if how == "open the parent":
        signal.pidfd_send_signal(os.pidfd_open(os.getppid()), signal.SIGKILL)
"""


@pytest.fixture(scope="module")
def agents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("agents") / "agents.py"
    path.write_text(AGENTS)
    return path


async def drive(path: Path, name: str, attempt_context: AttemptContext) -> Trajectory:
    return await get_agent(f"{path}:{name}").run(attempt_context)


def replies_of(*texts: str) -> Replies:
    return Replies(*(Message(role="assistant", content=text) for text in texts))


async def test_the_agent_of_the_documentation_leaves_a_whole_trajectory() -> None:
    backend = replies_of("#### 7", "#### 24")
    trajectory = await get_agent("tests/agents/two_turn_agent.py:Plain").run(context(backend))
    check_exact(trajectory, backend)
    assert (trajectory.stop_reason, len(trajectory.turns)) == (StopReason.DONE, 2)
    assert trajectory.artifact == b"#### 24"
    assert [m.content for m in trajectory.messages if m.role == "user"][-1] == AGAIN.content
    (sequence,) = trajectory.sequences
    assert sequence.span_kind_S.tolist() == [SpanKind.CONTEXT, SpanKind.TRAINED] * 2


async def test_the_loop_of_a_users_agent_leaves_what_the_native_loop_leaves(agents: Path) -> None:
    limits = RolloutLimits(max_tokens=1 << 14)
    ours, theirs = [
        await get_agent(name).run(context(Replies(*REPLIES), Repeatable(), limits))
        for name in ("native", f"{agents}:Loop")
    ]
    check_same(theirs, ours)


def test_resumed_after_any_record_the_trajectory_is_equal(agents: Path) -> None:
    async def loop(journal: AttemptJournal, replies: Replies, env: ToolEnv) -> Trajectory:
        limits = RolloutLimits(max_tokens=1 << 14)
        return await drive(agents, "Loop", context(replies, env, limits, journal=journal))

    async def body() -> None:
        log, env = Log(), Repeatable()
        whole = await loop(AttemptJournal(log), Replies(*REPLIES), env)
        kinds = "".join(type(record).__name__[0] for record in log.records)
        assert kinds == "RTTRTRTRA"
        for count in range(len(log.records) + 1):
            past, later, env = log.records[:count], Log(), Repeatable()
            turns = sum(type(record).__name__ == "RecordedCall" for record in past)
            answers = sum(type(record).__name__ == "ToolAnswer" for record in past)
            rest = Replies(*REPLIES[turns:])
            check_same(await loop(journal_of(past, later), rest, env), whole)
            assert len(rest.prompts) == len(REPLIES) - turns, "a turn was sampled twice"
            assert len(env.called) == len(CALLS) - answers
            assert len(past) + len(later.records) == len(log.records)

    asyncio.run(body())


async def test_conversations_side_by_side_and_forks_are_sequences_that_train_once(
    agents: Path,
) -> None:
    backend = replies_of("aaaaaaaa", "bbbbbbbb", "main", "left", "right")
    trajectory = await drive(agents, "Many", context(backend))
    train = (Lineage.MAIN, Lineage.SUBAGENT)
    same = replies_of("aaaaaaaa", "bbbbbbbb", "main", "left", "right")
    wider = await drive(agents, "Many", context(same, train=train))
    assert [sequence.weight for sequence in wider.sequences] == [0.25] * 4
    assert (trajectory.stop_reason, trajectory.artifact) == (StopReason.DONE, b"right")
    lineages = [sequence.lineage for sequence in trajectory.sequences]
    assert lineages == [Lineage.SUBAGENT, Lineage.SUBAGENT, Lineage.MAIN, Lineage.MAIN]
    trained = [SpanKind.TRAINED in s.span_kind_S for s in trajectory.sequences]
    assert trained == [False, False, True, True]
    main, branch = trajectory.sequences[2:]
    assert branch.parent == main.segment
    assert [s.weight for s in (main, branch)] == [0.5, 0.5]
    total = sum(len(s.logprobs_C) for s in trajectory.sequences)
    assert total == sum(len(completion.token_ids_C) for completion in backend.completions)
    by_turn = {turn.turn: turn for turn in trajectory.turns}
    assert [by_turn[turn].completion_tokens for turn in range(2)] == [4, 5]
    for prompt, completion in zip(backend.prompts, backend.completions, strict=True):
        whole = np.concatenate([prompt, completion.token_ids_C])
        ids = [s.token_ids_L for s in trajectory.sequences]
        assert any(np.array_equal(whole, sequence_ids[: len(whole)]) for sequence_ids in ids)


@pytest.mark.parametrize(
    ("name", "replies", "artifact"),
    [("Blocking", [], b"0 2 True 1"), ("Silent", ["#### 24"], b"#### 24")],
)
async def test_what_an_agent_returns_is_its_answer(
    agents: Path, name: str, replies: list[str], artifact: bytes
) -> None:
    trajectory = await drive(agents, name, context(replies_of(*replies)))
    assert (trajectory.stop_reason, trajectory.artifact) == (StopReason.DONE, artifact)


async def test_an_agent_uses_the_sandbox_of_its_task(agents: Path, tmp_path: Path) -> None:
    sandbox = LocalSandbox(tmp_path)
    trajectory = await drive(agents, "Sandboxed", context(replies_of(), sandbox=sandbox))
    assert trajectory.failure.code is FailureCode.NONE, trajectory.failure
    assert trajectory.artifact.startswith(b"written ")


@pytest.mark.parametrize(
    ("name", "replies", "limits", "stop", "code", "words"),
    [
        (
            "Loop",
            [ToolCall("python", {"code": "1"})] * 2,
            RolloutLimits(max_turns=2),
            StopReason.MAX_TURNS,
            FailureCode.MAX_TURNS,
            "2 turns",
        ),
        (
            "Asks",
            ["x" * 400],
            RolloutLimits(max_tokens=900),
            StopReason.CONTEXT,
            FailureCode.MAX_TOKENS,
            "new messages",
        ),
        (
            "Loop",
            ["x" * 9000],
            RolloutLimits(max_tokens=1000),
            StopReason.MAX_TOKENS,
            FailureCode.MAX_TOKENS,
            "cut off",
        ),
        (
            "Loop",
            [BackendError(FailureCode.BACKEND_UNAVAILABLE, "away")],
            RolloutLimits(),
            StopReason.FAILED,
            FailureCode.BACKEND_UNAVAILABLE,
            "away",
        ),
        (
            "Stubborn",
            ["one", BackendError(FailureCode.BACKEND_UNAVAILABLE, "away")],
            RolloutLimits(),
            StopReason.FAILED,
            FailureCode.BACKEND_UNAVAILABLE,
            "away",
        ),
        (
            "Twice",
            [None, "two"],
            RolloutLimits(),
            StopReason.FAILED,
            FailureCode.BAD_TASK,
            "twice at once",
        ),
        (
            "Number",
            [],
            RolloutLimits(),
            StopReason.FAILED,
            FailureCode.BAD_TASK,
            "gave 5; expected",
        ),
        ("Forged", [], RolloutLimits(), StopReason.FAILED, FailureCode.BAD_TASK, "asks for sample"),
    ],
)
async def test_how_an_attempt_of_a_users_agent_ends(
    agents: Path,
    name: str,
    replies: Sequence[str | ToolCall | BackendError | None],
    limits: RolloutLimits,
    stop: StopReason,
    code: FailureCode,
    words: str,
) -> None:
    attempt_context = context(Replies(*replies), limits=limits)
    trajectory = await drive(agents, name, attempt_context)
    assert (trajectory.stop_reason, trajectory.failure.code) == (stop, code), trajectory.failure
    assert words in trajectory.failure.message


SINS = {
    # code that computes reaches both limits, of the clock and the processor, at about the same time
    "spin": r"(longer than 2 s|more than 2 s of processor time) \(.*agents.py:\d+ in sin\)",
    "sleep": r"took longer than 2 s \(.*agents.py:\d+ in sin\)",
    "exit": r"ended its process \(exit code 3\)",
    "leave": r"SystemExit: enough \(.*agents.py:\d+ in sin\)",
    "raise": r"LookupError: no such city \(.*agents.py:\d+ in sin\)",
    "crash": r"ended its process \(SIGSEGV\) \(.*in sin\)",
    "eat": r"MemoryError.*\(.*agents.py:\d+ in sin\)",
    "close": r"ended its process",
    "threads": "",
    "fork": "",
    "kill the parent": r"PermissionError.*\(.*agents.py:\d+ in sin\)",
    "kill all": r"PermissionError.*\(.*agents.py:\d+ in sin\)",
    "kill the group": r"PermissionError.*\(.*agents.py:\d+ in sin\)",
    "open the parent": r"PermissionError.*\(.*agents.py:\d+ in sin\)",
}


@pytest.mark.parametrize("how", SINS)
async def test_what_an_agent_does_to_its_process_ends_its_own_attempt(
    agents: Path, how: str
) -> None:
    """An honest attempt beside it ends well, and what the sinner had sampled is kept."""
    task = Message(role="user", content="Half of 48?")
    limits = RolloutLimits(run_s=2.0) if how in ("spin", "sleep") else RolloutLimits()
    backend, honest = replies_of("one", "two"), replies_of("#### 24")
    attempt_context = context(backend, limits=limits)
    attempt_context.task = type(attempt_context.task)(
        task_id="t", env="math", prompt=how, data=attempt_context.task.data
    )
    attempt_context.messages = [task]
    guilty, innocent = await asyncio.gather(
        drive(agents, "Asks", attempt_context), drive(agents, "Loop", context(honest))
    )
    assert (innocent.failure.code, innocent.artifact) == (FailureCode.NONE, b"#### 24")
    assert guilty.turns[0].completion_tokens == len(backend.completions[0].token_ids_C)
    if not SINS[how]:
        assert (guilty.failure.code, guilty.artifact) == (FailureCode.NONE, b"two")
        return
    assert guilty.failure.code is FailureCode.BAD_TASK, guilty.failure
    assert re.search(SINS[how], guilty.failure.message), guilty.failure
    assert len(guilty.turns) == 1, "it was asked again, and what it had sampled was given again"
    if how == "raise":
        assert "Traceback" in guilty.messages[-1].content


@pytest.mark.parametrize(("name", "replies"), [("Once", ["one", "two"]), ("Torn", [None, "two"])])
async def test_an_agent_that_was_killed_from_outside_goes_on_from_its_journal(
    agents: Path, tmp_path: Path, name: str, replies: list[str | None]
) -> None:
    backend = Replies(*replies)
    attempt_context = context(backend)
    prompt = str(tmp_path / "mark")
    attempt_context.task = type(attempt_context.task)(
        task_id="t", env="math", prompt=prompt, data=attempt_context.task.data
    )
    trajectory = await drive(agents, name, attempt_context)
    assert (trajectory.failure.code, trajectory.artifact) == (FailureCode.NONE, b"two")
    assert len(trajectory.turns) == len(backend.completions)
    if name == "Once":
        check_exact(trajectory, backend)


async def test_an_attempt_that_a_limit_ended_leaves_its_process_to_the_next(agents: Path) -> None:
    calls = [ToolCall("python", {"code": "1"})] * 2
    for _ in range(3):
        trajectory = await drive(
            agents, "Loop", context(Replies(*calls), ToolEnv(), RolloutLimits(max_turns=2))
        )
        assert trajectory.stop_reason is StopReason.MAX_TURNS
    assert (await pool(helper_program(f"{agents}:Loop"))).starts == 1


async def test_a_cancelled_attempt_leaves_no_process_and_keeps_what_was_sampled(
    agents: Path,
) -> None:
    cancelled, backend = False, Replies("one", None)
    attempt_context = context(backend, cancelled=lambda: cancelled)
    attempt = asyncio.ensure_future(drive(agents, "Stubborn", attempt_context))
    await backend.waiting.wait()
    cancelled = True
    attempt.cancel()
    trajectory = await attempt
    assert trajectory.failure.code is FailureCode.CANCELLED
    assert len(trajectory.turns) == 1
    await until(lambda: not _helpers())


def _helpers() -> list[int]:
    """Processes of this test's agents that are at work."""
    pids = []
    for pid in descendants(os.getpid()):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        if b"prorl.agents.users_program" in words:
            pids.append(pid)
    return pids


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("NoRun", "is a NoRun without `run`"),
        ("Missing", "has no attribute 'Missing'"),
    ],
)
async def test_an_agent_that_cannot_be_made_is_refused_before_its_run(
    agents: Path, name: str, words: str
) -> None:
    from prorl.agents.users import check

    with pytest.raises(ConfigError, match=words):
        await check(f"{agents}:{name}")
