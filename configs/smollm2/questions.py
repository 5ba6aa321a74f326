"""Six kinds of little questions about numbers, each behind an answered one of its kind. No tools.

SmolLM2-135M answers about a fifth of them: often enough that groups differ, so that it can learn.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable

from prorl.envs.base import BaseEnv, Solution
from prorl.rubric import Rubric, reward
from prorl.types import Message, Task

EXAMPLES = {
    "larger": ("larger of 23 and 41", 41),
    "smaller": ("smaller of 62 and 36", 36),
    "largest": ("largest of 31, 14 and 80", 80),
    "smallest": ("smallest of 45, 17 and 92", 17),
    "last": ("last of 12, 64 and 31", 31),
    "after": ("number after 23", 24),
}


def two(draws: random.Random) -> list[int]:
    return draws.sample(range(10, 99), 2)


def three(draws: random.Random) -> list[int]:
    return draws.sample(range(10, 99), 3)


KINDS: dict[str, tuple[Callable[[random.Random], list[int]], str, Callable[[list[int]], int]]] = {
    "larger": (two, "larger of {} and {}", max),
    "smaller": (two, "smaller of {} and {}", min),
    "largest": (three, "largest of {}, {} and {}", max),
    "smallest": (three, "smallest of {}, {} and {}", min),
    "last": (three, "last of {}, {} and {}", lambda numbers: numbers[-1]),
    "after": (lambda draws: draws.sample(range(10, 98), 1), "number after {}", lambda n: n[0] + 1),
}


def tasks(env: str, seed: int, count: int, without: Iterable[Task] = ()) -> list[Task]:
    """`count` different tasks, the kinds in turn, and none of `without`; the same for the same
    seed. There are 88 of the kind `after`, so at most 528 in all.
    """
    draws, tasks, others = random.Random(seed), list[Task](), {task.prompt for task in without}
    while len(tasks) < count:
        kind = list(KINDS)[len(tasks) % len(KINDS)]
        draw, text, answer = KINDS[kind]
        numbers = draw(draws)
        if (prompt := text.format(*numbers)) not in others:
            others.add(prompt)
            data = {"kind": kind, "answer": answer(numbers)}
            tasks.append(Task(task_id=prompt, env=env, prompt=prompt, data=data))
    return tasks


@reward("right")
def right(task: Task, artifact: bytes) -> float:
    text = artifact.decode("utf-8", "replace").strip().removesuffix(".")
    return float(text == str(task.data["answer"]))


class Questions(BaseEnv):
    name = "questions"
    system = "You are a calculator."
    rubric = Rubric((right, 1.0))

    def messages(self, task: Task) -> tuple[Message, ...]:
        question, answer = EXAMPLES[str(task.data["kind"])]
        return (
            Message(role="system", content=self.system),
            Message(role="user", content=f"{question}?"),
            Message(role="assistant", content=str(answer)),
            Message(role="user", content=f"{task.prompt}?"),
        )

    def reference(self, task: Task) -> Solution:
        return Solution((), str(task.data["answer"]))
