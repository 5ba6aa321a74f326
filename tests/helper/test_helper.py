"""Helpers: answers, words and lines, limits, deaths, and what is left of them."""

from __future__ import annotations

import asyncio
import os
import random
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from prorl.helper.pool import close, pool
from prorl.helper.process import Died, Helper, HelperProgram, Late, Raised
from prorl.linux.procfs import start_ticks
from tests.waiting import until, wait_until

ROLE = """
import os, signal, subprocess, sys, time
import msgspec
from prorl.helper.child import serve

LEAK = []

def answer(question):
    verb, *rest = question
    if verb == "echo":
        return rest[0]
    if verb == "pid":
        return os.getpid()
    if verb == "raise":
        raise ValueError("no such city")
    if verb == "patch":
        os.getpid = None
        return "patched"
    if verb == "forge":
        for fd in range(3, 1024):  # the channel keeps the number that it had in the parent
            try:
                os.write(fd, b"\x05" + bytes(7) + b"abcde")
            except OSError:
                pass
        return "forged"
    if verb == "sleep":
        time.sleep(rest[0])
    if verb == "echo later":
        if rest[2]:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        time.sleep(rest[1])
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        return rest[0]
    if verb == "answer twice":
        number = rest[0]
        frame = msgspec.msgpack.encode((number, "value", "forged"))
        for fd in range(3, 1024):  # the channel keeps the number that it had in the parent
            try:
                os.write(fd, len(frame).to_bytes(8, "little") + frame)
            except OSError:
                pass
        return "answered"
    if verb == "meet":
        open(f"{rest[0]}/{os.getpid()}", "x")
        while len(os.listdir(rest[0])) < rest[1]:
            time.sleep(0.01)
        return os.getpid()
    if verb == "spin":
        while True:
            pass
    if verb == "exit":
        os._exit(3)
    if verb == "leave":
        sys.exit("enough")
    if verb == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if verb == "die once":
        try:
            open(rest[0], "x")
        except FileExistsError:
            return "alive"
        os.kill(os.getpid(), signal.SIGKILL)
    if verb == "eat":
        LEAK.append(bytearray(rest[0]))
        return "eaten"
    if verb == "fork":
        if os.fork() == 0:
            return "from a fork"
        return "from the helper"
    if verb == "children":
        return [subprocess.Popen(["sleep", "600"], start_new_session=True).pid, os.getpid()]
    if verb == "leave behind":
        print(subprocess.Popen(["sleep", "600"]).pid, file=open(rest[0], "w"), flush=True)
        time.sleep(600)
    if verb == "sleep until interrupted":
        if rest[0]:
            print(subprocess.Popen(["sleep", "600"]).pid, file=open(rest[0], "w"), flush=True)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            time.sleep(600)
        finally:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
    if verb == "object":
        return object()
    if verb == "much":
        return b"x" * (65 << 20)

def prepare(*arguments):
    if arguments == ("refuse",):
        raise RuntimeError("no licence")
    if arguments and arguments[0] == "die":
        try:
            open(arguments[1], "x")
        except FileExistsError:
            return answer
        os._exit(9)
    return answer

if __name__ == "__main__":
    serve(prepare)
"""


@pytest.fixture
async def role(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[HelperProgram]:
    (tmp_path / "role_of_tests.py").write_text(ROLE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    yield HelperProgram("role_of_tests", wall_s=30.0, memory_bytes=256 << 20)
    close()


async def _ask(program: HelperProgram, *question: object, wall_s: float = 0.0) -> object:
    answer: object = await (await pool(program)).ask(question, wall_s=wall_s)
    return answer


async def test_plain_data_comes_back(role: HelperProgram) -> None:
    for value in ("a", 7, [1, {"b": b"\0"}], None, "Grüße"):
        assert await _ask(role, "echo", value) == value


async def test_it_is_kept_warm_and_answers_a_single_question_at_a_time(role: HelperProgram) -> None:
    pids = [await _ask(role, "pid") for _ in range(3)]
    assert len(set(pids)) == 1
    many = await asyncio.gather(*(_ask(role, "pid") for _ in range(12)))
    assert 1 <= len(set(many)) <= role.most


async def test_what_it_raises_is_its_own_words_and_line(
    role: HelperProgram, tmp_path: Path
) -> None:
    with pytest.raises(Raised) as caught:
        await _ask(role, "raise")
    assert caught.value.words == "ValueError: no such city"
    assert caught.value.place.startswith(f"{tmp_path}/role_of_tests.py:")
    assert caught.value.place.endswith("in answer")
    with pytest.raises(Raised, match="SystemExit: enough"):
        await _ask(role, "leave")
    with pytest.raises(Raised, match="TypeError"):
        await _ask(role, "object")
    assert await _ask(role, "echo", 1) == 1


async def test_over_its_time_by_the_clock_it_is_killed_where_it_was(role: HelperProgram) -> None:
    pid = await _ask(role, "pid")
    began = time.monotonic()
    with pytest.raises(Late, match=r"longer than 0.5 s .*role_of_tests.py:\d+ in answer"):
        await _ask(role, "sleep", 600, wall_s=0.5)
    assert time.monotonic() - began < 60
    await until(lambda: _has_exited(pid))
    assert await _ask(role, "echo", 1) == 1


async def test_processor_time_is_its_own_limit(role: HelperProgram) -> None:
    role = replace(role, cpu_s=0.5)
    await _ask(role, "sleep", 1.0)
    with pytest.raises(Late, match="processor time"):
        await _ask(role, "spin")


async def test_time_without_a_processor_is_not_its_own(
    role: HelperProgram, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here all of its time is such time."""
    monkeypatch.setattr(Helper, "_starved_s", lambda self: time.monotonic())
    assert await _ask(role, "sleep", 2.5, wall_s=1.0) is None


async def test_a_question_is_repeated_once_when_the_process_ends(
    role: HelperProgram, tmp_path: Path
) -> None:
    assert await _ask(role, "die once", str(tmp_path / "once")) == "alive"
    helpers = await pool(role)
    before = helpers.starts
    with pytest.raises(Died, match=r"exit code 3") as caught:
        await _ask(role, "exit")
    assert not caught.value.was_killed
    assert helpers.starts == before + 1
    with pytest.raises(Died, match=r"SIGSEGV.*role_of_tests.py:\d+ in answer"):
        await _ask(role, "crash")


async def test_memory_that_an_earlier_question_took_is_not_the_next_ones_fault(
    role: HelperProgram,
) -> None:
    for _ in range(5):
        assert await _ask(role, "eat", 100 << 20) == "eaten"
    with pytest.raises(Raised, match=r"MemoryError.*in answer"):
        await _ask(role, "eat", 1 << 30)


async def test_what_an_earlier_question_changed_is_not_the_next_ones_fault(
    role: HelperProgram,
) -> None:
    assert await _ask(role, "patch") == "patched"
    assert isinstance(await _ask(role, "pid"), int)


async def test_a_frame_of_someone_else_is_no_answer_of_the_next_question(
    role: HelperProgram,
) -> None:
    for _ in range(2):
        with pytest.raises(Raised, match="an answer that cannot be read"):
            await _ask(role, "forge")
        assert await _ask(role, "echo", 1) == 1


async def test_what_it_forks_answers_nobody(role: HelperProgram) -> None:
    for _ in range(3):
        assert await _ask(role, "fork") == "from the helper"
    assert await _ask(role, "echo", 1) == 1


async def test_what_it_started_is_killed_with_it(role: HelperProgram, tmp_path: Path) -> None:
    pids = await _ask(role, "children")
    assert isinstance(pids, list)
    with pytest.raises(Late):
        await _ask(role, "leave behind", str(tmp_path / "pid"), wall_s=1.0)
    await until(lambda: all(map(_has_exited, [*pids, int((tmp_path / "pid").read_text())])))


async def test_an_answer_without_end_is_refused(role: HelperProgram) -> None:
    with pytest.raises(Raised, match="an answer of"):
        await _ask(role, "much")
    assert await _ask(role, "echo", 1) == 1


async def test_who_gives_up_waiting_has_it_stopped(role: HelperProgram) -> None:
    pid = await _ask(role, "pid")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await _ask(role, "sleep", 60)
    await until(lambda: _has_exited(pid))
    assert await _ask(role, "echo", 1) == 1


@pytest.mark.parametrize(("leaves_child", "is_kept"), [(False, True), (True, False)])
async def test_code_that_stops_when_its_question_is_given_up_keeps_its_process(
    role: HelperProgram, tmp_path: Path, leaves_child: bool, is_kept: bool
) -> None:
    pid, child = await _ask(role, "pid"), str(tmp_path / "pid") if leaves_child else ""
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5):
            await _ask(role, "sleep until interrupted", child)
    assert (await _ask(role, "pid") == pid) is is_kept
    assert await _ask(role, "echo", 1) == 1
    if leaves_child:
        await until(lambda: _has_exited(int((tmp_path / "pid").read_text())))


async def test_a_start_that_raises_is_refused_with_its_words_and_not_tried_by_each(
    role: HelperProgram, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["prorl.helper.pool"], "REFUSED_S", 600.0)
    role = replace(role, arguments=("refuse",))
    for _ in range(5):
        with pytest.raises(Raised, match=r"RuntimeError: no licence .*in prepare"):
            await _ask(role, "echo", 1)
    assert (await pool(role)).starts == 1


async def test_a_start_that_dies_once_is_tried_again(role: HelperProgram, tmp_path: Path) -> None:
    role = replace(role, arguments=("die", str(tmp_path / "died")))
    assert await _ask(role, "echo", 1) == 1


def test_they_end_with_their_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "role_of_tests.py").write_text(ROLE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    pid = asyncio.run(_ask(HelperProgram("role_of_tests"), "pid"))
    wait_until(lambda: _has_exited(pid), "it ends with its loop", 10.0)


def _has_exited(pid: object) -> bool:
    assert isinstance(pid, int)
    return start_ticks(pid) is None and pid != os.getpid()


async def test_who_has_little_time_does_not_wait_in_line_for_longer(role: HelperProgram) -> None:
    helpers = await pool(replace(role, most=1))
    long = asyncio.create_task(helpers.ask(("sleep", 20)))
    await asyncio.sleep(0.1)
    with pytest.raises(Late, match=r"waited 0\.5 s for a helper") as caught:
        await helpers.ask(("echo", 1), wall_s=0.5, strict=True)
    assert caught.value.waits_for_us
    long.cancel()
    await asyncio.gather(long, return_exceptions=True)


@pytest.mark.parametrize(
    ("num_questions", "share"),
    [(80, 0.3), pytest.param(10_000, 0.1, marks=pytest.mark.slow)],
)
@pytest.mark.timeout(1800)
async def test_no_question_gets_the_answer_of_another_whatever_is_cancelled_when(
    role: HelperProgram, num_questions: int, share: float
) -> None:
    """Some that ask give up, most of those once more while the helper is being stopped."""
    helpers, draw = await pool(role), random.Random(7)
    questions, wrong = iter(range(num_questions)), list[tuple[int, object]]()
    num_cancelled = 0

    async def ask_some() -> None:
        nonlocal num_cancelled
        for number in questions:
            ends = draw.random() < share
            delay_s = 0.02 + 0.03 * draw.random() if ends else 0.001
            question = ("echo later", number, delay_s, draw.random() < 0.5)
            asking = asyncio.ensure_future(helpers.ask(question, again=draw.random() < 0.5))
            if ends:
                await asyncio.sleep(0.04 * draw.random())
                num_cancelled += not asking.done()
                asking.cancel()
                await asyncio.sleep(0.01 * draw.random())
                asking.cancel()
            answer: object = (await asyncio.gather(asking, return_exceptions=True))[0]
            if not isinstance(answer, asyncio.CancelledError) and answer != number:
                wrong.append((number, answer))

    await asyncio.gather(*(ask_some() for _ in range(6)))
    assert wrong == []
    assert num_cancelled > num_questions / 50


async def test_an_unrequested_answer_does_not_answer_the_next_question(role: HelperProgram) -> None:
    assert await _ask(role, "echo", 0) == 0
    assert await _ask(role, "answer twice", 2) == "forged"  # it may lie about its own
    assert await _ask(role, "echo", 1) == 1


async def test_helpers_are_started_where_that_pays(role: HelperProgram, tmp_path: Path) -> None:
    """Short questions share a process; those that wait for each other get one each."""
    role = replace(role, most=8)
    many = await asyncio.gather(*(_ask(role, "pid") for _ in range(48)))
    assert len(set(many)) <= 2
    (tmp_path / "met").mkdir()
    met = await asyncio.gather(*(_ask(role, "meet", str(tmp_path / "met"), 8) for _ in range(8)))
    assert len(set(met)) == 8
    assert (await pool(role)).starts == 8
