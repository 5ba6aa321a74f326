"""Forty hostile programs at the model endpoint, from inside their sandboxes, beside honest ones.

    pytest -q -s -m slow tests/security/test_endpoint.py

It prints how long the honest rollouts took alone, beside as many programs that compute and ask
nothing (they take the same processors), and beside the hostile ones, and what the
process `service`, which has RUN in it, grew by.
What is asserted holds on a loaded machine too: no process dies, the service's memory stays within
the bound that docs/agents.md states, every honest rollout completes at its first attempt, and each
hostile program is charged to its own rollout, once, as the table `ENDS` says.
"""

from __future__ import annotations

import asyncio
import shlex
import time
from pathlib import Path

import pytest

from prorl.agents.capture.model_endpoint import UNSHOWN_BYTES
from prorl.agents.program import NO_CALL as NO_CALL_MESSAGE
from prorl.cli.progress import follow
from prorl.deploy.running import client_of, service, signals
from prorl.supervisor.service import Supervisor
from prorl.types import Task
from tests.agents.test_program import LOOP
from tests.integration.run_checks import check_complete, rows
from tests.integration.services import settings, slots

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

HOSTILE = r"""
import json, os, socket, sys, threading, time, urllib.request
HOST, PORT = os.environ["OPENAI_BASE_URL"].split("//")[1].split("/")[0].split(":")
HOW, UNTIL = os.environ["PRORL_PROMPT"].split()[0], time.monotonic() + 25

def connect():
    at = socket.create_connection((HOST, int(PORT)), timeout=10)
    return at

def post(path, body, length=None):
    head = f"POST /v1/{path} HTTP/1.1\r\nHost: x\r\nContent-Length: {length or len(body)}\r\n\r\n"
    return head.encode() + body

def chat(messages, **more):
    return post("chat/completions", json.dumps({"messages": messages} | more).encode())

def said(text, role="user"):
    return {"role": role, "content": text}

def send(data, read=True):
    with connect() as at:
        at.sendall(data)
        return at.recv(65536) if read else None

def hold(data, count):
    held = []
    while len(held) < count and time.monotonic() < UNTIL:
        try:
            at = connect()
            at.settimeout(2)
            at.sendall(data)
            held.append(at)
        except OSError:
            time.sleep(0.1)
    time.sleep(max(UNTIL - time.monotonic(), 0))

def attack():
    if HOW == "spin":
        return sum(range(100_000))
    many = [said("a")] * 200_000
    count = post("messages/count_tokens", json.dumps({"messages": [said("x " * 8000)]}).encode())
    deep = b'{"messages": ' + b"[" * 100_000
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    wide = {"properties": {str(i): {"anyOf": [{"type": "string"}] * 9} for i in range(9000)}}
    huge = {"type": "function", "function": {"name": "f", "parameters": wide}}
    match HOW:
        case "messages": send(chat(many))
        case "text": send(chat([said("word " * 3_000_000)]))
        case "connections": hold(b"", 900)
        case "bodies": hold(post("chat/completions", b"x" * 500_000, 900_000), 200)
        case "deep": send(post("chat/completions", deep))
        case "count": send(count)
        case "slow": hold(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nX-A: ", 100)
        case "tools": send(chat([said("a")], tools=[tool] * 10_000))
        case "schemas": send(chat([said("a")], tools=[huge]))
        case "unread": hold(chat([said("a")], stream=True), 100)
        case "half":
            with connect() as at:
                at.sendall(chat([said("a")])[:80])
                at.shutdown(socket.SHUT_WR)
                at.recv(100)
        case "pipelined": send(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n" * 5000)
        case "headers": send(b"GET / HTTP/1.1\r\n" + b"X-Flood: aaaaaaaaaaaaaaaa\r\n" * 100_000)
        case "mad": send(chat([{"role": [], "content": {}}], tools=[{"anyOf": 5}]))
        case "heads": send(b"HEAD / HTTP/1.1\r\nHost: x\r\n\r\n")
        case "sockets":
            for folder in ("/run", "/tmp", "/var/run", "/"):
                for root, _, names in os.walk(folder):
                    for name in names[:50]:
                        if name.endswith(".sock"):
                            with socket.socket(socket.AF_UNIX) as at:
                                at.connect(os.path.join(root, name))
                    if root.count("/") > 3:
                        break
            time.sleep(1)

def loop():
    while time.monotonic() < UNTIL:
        try:
            attack()
        except Exception:
            time.sleep(0.02)

for thread in [threading.Thread(target=loop) for _ in range(4)]:
    thread.start()
"""
NO_CALL = ("failed", "task", "bad_task")
"""What is charged for a program of whose requests none became a model call: its user's mistake,
which no further attempt mends, and no reward.
"""
ENDS = {
    "messages": NO_CALL,
    "text": NO_CALL,
    "connections": NO_CALL,
    "bodies": NO_CALL,
    "deep": NO_CALL,
    "count": NO_CALL,
    "slow": NO_CALL,
    "tools": NO_CALL,
    "schemas": NO_CALL,
    "unread": ("completed", "", ""),  # valid calls, whose replies nobody reads
    "half": NO_CALL,
    "pipelined": NO_CALL,
    "headers": NO_CALL,
    "mad": NO_CALL,
    "heads": NO_CALL,
    "sockets": NO_CALL,
}
CHARGED = """
select split_part(task_id, ' ', 1) as program, status, failure_class, failure_code,
    max(attempt) as last_attempt, count(*) as rollouts, min(failure_message) as message
from rollouts group by all order by program
"""
NUM_HOSTILE = 40
MAX_TOKENS = 16384
BOUND_BYTES = NUM_HOSTILE * ((32 << 20) + 5 * (2 * MAX_TOKENS + UNSHOWN_BYTES))
"""What the process may grow by (docs/agents.md); a token of this tokenizer is a byte."""


def _rss(running: Supervisor) -> int:
    """Resident bytes of the process `service`, in whose loop RUN and its endpoints are."""
    text = Path(f"/proc/{running.children['service'].pid}/status").read_text()
    return next(int(line.split()[1]) << 10 for line in text.splitlines() if line[:6] == "VmRSS:")


async def test_forty_hostile_programs_harm_only_themselves(
    tmp_path: Path, sandbox_kind: str
) -> None:
    root = tmp_path / "root"
    config = settings(root, sandbox_kind, "scripted:noop", **slots(NUM_HOSTILE + 8))

    async with signals() as stop, service(config, stop) as running:
        client = client_of(running)

        async def begin(run: str, tasks: list[Task], agent: str) -> None:
            limits = {"run_s": 60.0, "max_tokens": MAX_TOKENS, "max_turns": 1000}
            await asyncio.to_thread(client.create_run, run_id=run, agent=agent, limits=limits)
            await asyncio.to_thread(client.submit, run, tasks, 1, key="k", last=True)

        async def honest(run: str) -> float:
            prompts = [Task(task_id=f"noop/{i}", env="noop", prompt=f"Say {i}.") for i in range(24)]
            began = time.monotonic()
            await begin(run, prompts, f"command: python3 -c {shlex.quote(LOOP)}")
            await follow(client, running, run, len(prompts), quiet=True)
            return time.monotonic() - began

        async def attack(run: str, hows: tuple[str, ...]) -> None:
            prompts = [f"{hows[i % len(hows)]} {i}" for i in range(NUM_HOSTILE)]
            tasks = [Task(task_id=prompt, env="noop", prompt=prompt) for prompt in prompts]
            await begin(run, tasks, f"command: python3 -c {shlex.quote(HOSTILE)}")
            await asyncio.sleep(5)

        await honest("warm")
        alone_s = await honest("alone")
        await attack("spinning", ("spin",))
        spinning_s, before = await honest("beside-spinning"), _rss(running)
        await follow(client, running, "spinning", NUM_HOSTILE, quiet=True)
        await attack("hostile", tuple(ENDS))
        grown, beside = 0, asyncio.create_task(honest("beside"))
        while not beside.done():
            grown = max(grown, _rss(running) - before)
            await asyncio.wait({beside}, timeout=0.2)
        await follow(client, running, "hostile", NUM_HOSTILE, quiet=True)
        grown = max(grown, _rss(running) - before)
        print(
            f"honest rollouts: {alone_s:.1f} s alone, {spinning_s:.1f} s beside {NUM_HOSTILE}"
            f" programs that only compute, {beside.result():.1f} s beside hostile ones;"
            f" the service grew by {grown >> 20} MiB (bound {BOUND_BYTES >> 20} MiB);"
            f" {running.restarts} deaths"
        )
        assert running.restarts == 0
        assert 0 < grown < BOUND_BYTES
    for run in ("warm", "alone", "beside-spinning", "beside"):
        stored = check_complete(root / run, 24)
        ends = rows(stored, "select distinct status, failure_code, attempt from rollouts")
        assert ends == [{"status": "completed", "failure_code": "", "attempt": 1}]
        assert rows(stored, "select * from attempts") == []
    stored = check_complete(root / "hostile", NUM_HOSTILE)
    charged = rows(stored, CHARGED)
    for row in charged:
        print(row)
    assert len(charged) == len(ENDS)
    for row in charged:
        expected = ENDS[row["program"]]
        assert (row["status"], row["failure_class"], row["failure_code"]) == expected, row
        assert row["last_attempt"] == 1, row
        assert (NO_CALL_MESSAGE in row["message"]) == (expected is NO_CALL), row
