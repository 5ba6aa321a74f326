"""Programs as agents: unmodified, in a sandbox, over HTTP; each way one can end."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import orjson
import pytest
import yaml

from prorl.agents import check_agent, get_agent
from prorl.agents.context import Agent, AttemptContext
from prorl.agents.program import command
from prorl.agents.programs import PROGRAMS, program_of
from prorl.envs import get_env
from prorl.envs.base import BaseEnv
from prorl.envs.tools import BASH
from prorl.errors import BackendError, ConfigError, RolloutError
from prorl.journal import AttemptJournal
from prorl.limits import Deadline
from prorl.protocols import Sandbox
from prorl.tasks import load_tasks
from prorl.testing import LocalSandbox, Replies, Reply, isolated, play
from prorl.types import (
    HOST_WHEELS,
    FailureCode,
    Json,
    Message,
    RolloutLimits,
    Stage,
    StopReason,
    Task,
    ToolCall,
)
from tests.agents.test_native import context

LOOP = """
import json, os, subprocess, urllib.request
messages = [{"role": "user", "content": os.environ["PRORL_PROMPT"]}]
schema = {"type": "object", "properties": {"command": {"type": "string"}}}
tools = [{"type": "function", "function": {"name": "bash", "parameters": schema}}]
while True:
    body = json.dumps({"model": "policy", "messages": messages, "tools": tools}).encode()
    ask = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body)
    said = json.load(urllib.request.urlopen(ask))["choices"][0]["message"]
    messages.append(said)
    for call in said.get("tool_calls", ()):
        line = json.loads(call["function"]["arguments"]).get("command", "")
        done = subprocess.run(["bash", "-c", line], capture_output=True, text=True)
        said = done.stdout + done.stderr
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": said})
    if messages[-1]["role"] == "assistant":
        break
print(said["content"])
"""
"""An agent such as people write them, of the standard library alone."""


class Notes(BaseEnv):
    """An env whose artifact is what the program has written to `note`."""

    name = "notes"
    offers = (BASH,)

    async def artifact(self, task: Task, final: str, sandbox: Sandbox | None) -> bytes:
        assert sandbox is not None
        return (await sandbox.exec(["cat", "note"], 10.0)).output.encode()


def notes(**data: Json) -> Task:
    return Task(task_id="t", env="notes", prompt="?", data=data)


def bash(line: str) -> Message:
    return Message(role="assistant", content="", tool_calls=(ToolCall("bash", {"command": line}),))


def attempt(folder: Path, *replies: Reply, run_s: float = 60.0) -> AttemptContext:
    made = context(Replies(*replies), Notes(), RolloutLimits(run_s=run_s, max_turns=3))
    return replace(made, sandbox=LocalSandbox(folder), deadline=Deadline(run_s))


def program(script: str) -> Agent:
    return get_agent(f"command: python3 -c {shlex.quote(script)}")


@pytest.fixture(autouse=True)
def homes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder is a sandbox that shares /tmp with its host: homes are made there."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))


async def test_a_loop_of_ones_own_mends_a_repository_in_a_sandbox_without_network() -> None:
    calc = next(iter(load_tasks(str(Path(__file__).parents[1] / "envs" / "swe_tasks.jsonl"))))
    mend = """sed -i 's/text.strip()/text.strip().replace(",", "")/' calc/parse.py; git diff"""
    agent = f"command: python3 -c {shlex.quote(LOOP)}"
    backend = Replies(bash("ls"), bash(mend), "It is mended.")
    played = await play(get_env("swe"), calc, backend, boxes=isolated(), agent=agent)
    assert played.reward == 1.0
    (sequence,) = played.trajectory.sequences
    assert sum(map(len, [completion.token_ids_C for completion in backend.completions])) == len(
        sequence.logprobs_C
    )


NOTE = bash("echo mine > note")


REFUSED = """
import os, urllib.error, urllib.request
for body in (b"{}", b"[" * 100):
    try:
        urllib.request.urlopen(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body)
    except urllib.error.HTTPError as error:
        assert error.code == 400
"""


@pytest.mark.parametrize(
    ("script", "replies", "code", "words", "artifact"),
    [
        (LOOP, [NOTE, "done"], "", "", b"mine\n"),
        (LOOP + "raise SystemExit(7)", [NOTE, "done"], "", "", b"mine\n"),
        ("print('no key'); raise SystemExit(7)", [], "bad_task", "no key", b""),
        ("import os; os.kill(os.getpid(), 9)", [], "stage_error", "status 137 after ", b""),
        (REFUSED, [], "bad_task", "no model call (the endpoint refused its requests, the", b""),
        (REFUSED, [], "bad_task", "400: the body is no JSON: ", b""),
        (REFUSED, [], "bad_task", "): it ended with exit status 0 after ", b""),
        (LOOP + "input()\nwhile 1: pass", [NOTE, "done"], "", "", b"mine\n"),  # stdin is at its end
        (LOOP, [NOTE] * 9, "max_turns", "3 calls", b"mine\n"),
        (
            LOOP,
            [NOTE, BackendError(FailureCode.BACKEND_UNAVAILABLE, "gone")],
            "backend_unavailable",
            "gone",
            b"",
        ),
    ],
)
async def test_its_end_is_the_attempts(
    tmp_path: Path, script: str, replies: list[Reply], code: str, words: str, artifact: bytes
) -> None:
    trajectory = await program(script).run(attempt(tmp_path, *replies))
    assert trajectory.failure.code == code, trajectory.failure.message
    assert words in trajectory.failure.message
    assert trajectory.artifact == artifact
    if not code:
        assert trajectory.stop_reason is StopReason.DONE
        assert "python3 ended with exit status" in trajectory.messages[-1].content


@pytest.mark.parametrize(
    ("name", "program", "remedy"),
    [
        ("command: nonesuch", "nonesuch", "in the task's data.requirements"),
        ("command: bash -c 'exec nonesuch'", "nonesuch", "in the task's data.requirements"),
        ("mini-swe-agent", "mini", "`RUN pip install mini-swe-agent==2.4.6 mcp`"),
        ("pi", "pi", "`RUN npm install -g @earendil-works/pi-coding-agent@1.6.0`"),
    ],
)
async def test_a_missing_program_is_named_with_what_installs_it(
    tmp_path: Path, name: str, program: str, remedy: str
) -> None:
    trajectory = await get_agent(name).run(attempt(tmp_path))
    assert trajectory.failure.code is FailureCode.BAD_TASK
    assert trajectory.failure.message.startswith(f"the sandbox has no program {program!r}; ")
    assert remedy in trajectory.failure.message


async def test_the_last_lines_of_what_it_printed_are_shown_whole(tmp_path: Path) -> None:
    prints = "print('first ' * 50); print('second ' * 50); print('x' * 600 if LONG else 'last')"
    for is_long, end in ((False, f"{'second ' * 50}\nlast"), (True, "x" * 500)):
        script = prints.replace("LONG", str(is_long))
        trajectory = await program(script).run(attempt(tmp_path))
        assert re.search(rf" s: {end}$", trajectory.failure.message)


async def test_time_that_ends_ends_it_and_what_it_did_counts(tmp_path: Path) -> None:
    hangs = LOOP + "open('pid', 'w').write(str(os.getpid()))\nimport time; time.sleep(999)"
    trajectory = await program(hangs).run(attempt(tmp_path, NOTE, "done", run_s=3.0))
    assert trajectory.failure.code is FailureCode.DEADLINE
    assert trajectory.artifact == b"mine\n"
    assert not Path(f"/proc/{(tmp_path / 'pid').read_text()}").exists()


async def test_time_that_ends_before_the_first_token_is_the_backends(tmp_path: Path) -> None:
    trajectory = await program(LOOP).run(attempt(tmp_path, None, run_s=3.0))
    assert trajectory.failure.code is FailureCode.BACKEND_UNAVAILABLE


async def test_a_program_that_hangs_before_its_first_call_is_its_users(tmp_path: Path) -> None:
    trajectory = await program("import time; time.sleep(99)").run(attempt(tmp_path, run_s=1.0))
    assert trajectory.failure.code is FailureCode.BAD_TASK
    assert "no model call" in trajectory.failure.message


async def test_a_program_that_ends_before_its_first_reply_is_tried_again(tmp_path: Path) -> None:
    made = attempt(tmp_path, None)
    assert isinstance(made.backend, Replies)
    call = f"import threading\nthreading.Thread(target=exec, args=[{LOOP!r}], daemon=True).start()"
    running = asyncio.ensure_future(
        program(f"{call}\nimport os\nwhile not os.path.exists('go'): pass").run(made)
    )
    await made.backend.waiting.wait()
    (tmp_path / "go").touch()
    assert (await running).failure.code is FailureCode.STAGE_ERROR


async def test_a_cancel_in_the_middle_of_a_call_ends_it(tmp_path: Path) -> None:
    made = attempt(tmp_path, bash("cat /proc/$PPID/stat > note"), None)
    assert isinstance(made.backend, Replies)
    running = asyncio.ensure_future(program(LOOP).run(made))
    await made.backend.waiting.wait()
    made.cancelled = lambda: True
    running.cancel()
    trajectory = await running
    assert trajectory.failure.code is FailureCode.CANCELLED
    assert len(trajectory.turns) == 1
    assert not Path(f"/proc/{(tmp_path / 'note').read_text().split()[0]}").exists()


async def test_an_attempt_begun_by_another_worker_is_not_resumed(tmp_path: Path) -> None:
    made = replace(attempt(tmp_path, "done"), journal=AttemptJournal(resumes=1))
    assert (await program(LOOP).run(made)).failure.code is FailureCode.WORKER_LOST


# ---- the table


SEEN = """#!/usr/bin/env python3
import json, os, sys
paths = [name for name in sys.argv if name.startswith("/") and name != "/dev/null"]
files = {name: open(name).read() for name in paths}
held = os.environ.get("PRORL_PROMPT", "")
file = open(os.environ["PRORL_PROMPT_FILE"]).read()
seen = {"argv": sys.argv, "stdin": sys.stdin.read(), "files": files, "variable": held, "file": file}
json.dump(seen | {"url": os.environ["ANTHROPIC_BASE_URL"]}, open("seen", "w"))
"""
PROMPTS = {
    "odd": "--strict is ignored by {model} for {home}\n- [ ] I have searched\n"
    '- [x] \\U0001F600 "quoted": {a: 1}',
    "long": "\N{GRINNING FACE}\N{LINE SEPARATOR}\x7f'x' " * 20_000,
}


@pytest.mark.parametrize("prompt", PROMPTS.values(), ids=PROMPTS)
@pytest.mark.parametrize("name", [*PROGRAMS, "command: loop {prompt_file}"])
async def test_a_prompt_reaches_each_program_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, prompt: str
) -> None:
    row = program_of(name)
    assert row is not None
    stub = tmp_path / "bin" / row.argv[0]
    stub.parent.mkdir()
    stub.write_text(SEEN)
    stub.chmod(0o755)
    monkeypatch.setenv("PATH", f"{stub.parent}:{os.environ['PATH']}")
    made = context(Replies())
    made.messages = (Message(role="user", content=prompt),)
    options = [word for word in row.argv if word.endswith("={prompt}")]  # no file, no stdin
    if options and len(prompt) > 100_000:
        with pytest.raises(RolloutError, match="expected at most 120,000 bytes"):
            command(row, made, "http://127.0.0.1:8000")
        return
    argv, stdin = command(row, made, "http://127.0.0.1:8000")
    done = await LocalSandbox(tmp_path).exec(argv, 60.0, stdin)
    assert done.exit_code == 0, done.output
    seen = orjson.loads((tmp_path / "seen").read_bytes())
    read = {seen["stdin"], *seen["files"].values()}
    read |= {yaml.safe_load(text)["run"]["task"] for text in read if text.startswith("run:")}
    if options:
        option = options[0].replace("{prompt}", prompt)
        seen["argv"].remove(option)
        read.add(option.partition("=")[2])
    assert prompt in read
    assert seen["file"] == prompt
    assert seen["variable"] == ("" if len(prompt) > 100_000 else prompt)
    assert prompt not in seen["argv"]
    assert not re.search(r"\{(prompt|system|base_url|model|context|home)", " ".join(seen["argv"]))
    assert seen["url"] == "http://127.0.0.1:8000"
    check_agent(name)
    assert get_agent(name)


async def test_a_prompt_that_no_word_holds_is_refused_with_the_mend(tmp_path: Path) -> None:
    made = attempt(tmp_path, "done")
    made.messages = (Message(role="user", content="x" * 140_000),)
    trajectory = await get_agent("command: echo {prompt}").run(made)
    assert trajectory.failure.code is FailureCode.BAD_TASK
    assert "$PRORL_PROMPT_FILE" in trajectory.failure.message


def test_its_packages_join_those_of_a_task_without_image() -> None:
    mini = PROGRAMS["mini-swe-agent"]
    spec = mini.sandbox(Notes(), notes(requirements=["pytest"], wheels=HOST_WHEELS))
    assert spec.requirements == ("pytest", *mini.requirements)
    assert spec.wheels == ""
    assert mini.sandbox(Notes(), notes(image="swe")).requirements == ()
    assert mini.sandbox(Notes(), notes()).requirements == mini.requirements


@pytest.mark.parametrize("without", [{}, {"settings": {"tools": []}}])
def test_a_tasks_data_describes_its_sandbox_where_the_env_offers_no_tools(
    without: Mapping[str, Json],
) -> None:
    env = Notes() if without else BaseEnv()
    further = {"requirements": ["openai"], "sandbox": {"cpus": 2.0}, "network": "public"}
    task = notes(**without, **further)
    assert env.sandbox(task, Stage.RUN) is None
    own = PROGRAMS["mini-swe-agent"].requirements
    for agent, packages in (("command: python3 loop.py", ()), ("mini-swe-agent", own)):
        program = program_of(agent)
        assert program is not None
        spec = program.sandbox(env, task)
        assert spec.requirements == ("openai", *packages)
        assert (spec.cpus, spec.network_mode) == (2.0, "public")


@pytest.mark.parametrize("name", ["command:", "command: 'a", "mini-swe-agnet"])
def test_a_wrong_name_is_refused_in_a_single_line(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_agent(name)
    assert "\n" not in str(caught.value)
