"""What all players share: the tasks, their right answers, and the trainer's own record."""

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

SYSTEM = "Use the tool for every step of arithmetic. End with `#### answer`."
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "bash",
            "description": "Run a command.",
            "parameters": {
                "type": "object",
                "properties": {"command": {"type": "string"}},
                "required": ["command"],
            },
        },
    }
]
TRY_S, PATIENCE_S = 60.0, 140.0
"""Of a rollout by a trainer whose framework has neither retries nor limits of its own: the longest
of one try, and of all; a server that was killed is waited for.
"""


def prompt(task: int) -> str:
    return f"[{task}] Work out the chain that starts at {task}."


def answer(task: int) -> int:
    """Three times `x * 3 + turn`: the script of `model.py`."""
    for turn in range(3):
        task = task * 3 + turn
    return task


def reward(task: int, said: str) -> float:
    """1 for the answer alone, behind `####` where that is said."""
    return float(said.rsplit("####", 1)[-1].strip() == str(answer(task)))


def shell(command: str) -> str:
    """The command's output, from a shell of this host: what an env without sandboxes does."""
    argv = ["bash", "-c", command]
    return subprocess.run(argv, capture_output=True, text=True, timeout=30).stdout


class Job:
    """What a player was asked (its first argument, JSON), and the file of what it delivered.

    A line of that file, written at once, is the checkpoint of everybody's trainer: what it holds
    was trained on, and a player that starts again leaves that out.
    """

    def __init__(self) -> None:
        said = json.loads(sys.argv[1])
        self.folder, self.url, self.port = Path(said["folder"]), said["url"], said["port"]
        self.tokenizer: str = said["tokenizer"]
        self.tasks: list[int] = said["tasks"]
        self.n, self.in_flight = said["n"], said["in_flight"]
        self._path = self.folder / "delivered.jsonl"
        self.delivered = read(self._path)
        self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def left(self) -> list[tuple[int, int]]:
        """Pairs of task and sample that are not delivered yet."""
        done = {(task, sample) for line in self.delivered for task, sample, _ in line["rollouts"]}
        every = [(task, sample) for task in self.tasks for sample in range(self.n)]
        return [one for one in every if one not in done]

    def deliver(self, *rollouts: tuple[int, int, float], cursor: str = "") -> None:
        line = {"at": time.time(), "rollouts": rollouts, "cursor": cursor}
        os.write(self._file, json.dumps(line).encode() + b"\n")


async def play(job: Job, one: Callable[[int], Awaitable[float]]) -> None:
    """Every rollout that is left, `in_flight` at a time, each tried again where it fails."""

    async def rollout(task: int, sample: int) -> None:
        job.deliver((task, sample, await tried(lambda: one(task))))

    await at_most(job.in_flight, [lambda at=at: rollout(*at) for at in job.left()])


async def play_groups(job: Job, group: Callable[[int, int], Awaitable[list[float]]]) -> None:
    """The same by groups."""

    async def siblings(task: int) -> None:
        rewards = await tried(lambda: group(task, job.n))
        job.deliver(*((task, sample, reward) for sample, reward in enumerate(rewards)))

    tasks = dict.fromkeys(task for task, _ in job.left())
    await at_most(job.in_flight // job.n, [lambda task=task: siblings(task) for task in tasks])


async def tried(work: Callable):
    until = time.monotonic() + PATIENCE_S
    while True:
        try:
            return await asyncio.wait_for(work(), TRY_S)
        except Exception as error:
            print(f"{type(error).__name__}: {error}"[:300], file=sys.stderr, flush=True)
            if time.monotonic() > until:
                raise
            await asyncio.sleep(1.0)


async def at_most(count: int, works: list[Callable]) -> None:
    places = asyncio.Semaphore(count)

    async def placed(work: Callable) -> None:
        async with places:
            try:
                await work()
            except Exception as error:  # noqa: BLE001 - given up: the trainer goes on with the others
                print(f"gave up: {error}"[:300], file=sys.stderr, flush=True)

    await asyncio.gather(*map(placed, works))


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
