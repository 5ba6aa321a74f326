"""The tasks as an env of prorl."""

import sys
from pathlib import Path

from prorl.envs.base import BaseEnv
from prorl.envs.tools import BASH
from prorl.rubric import Rubric, reward
from prorl.types import Task

sys.path.insert(0, str(Path(__file__).parent))
import chain


@reward("exact")
def exact(task: Task, artifact: bytes) -> float:
    return chain.reward(task.data["number"], artifact.decode())


class Chain(BaseEnv):
    name = "chain"
    system = chain.SYSTEM
    offers = (BASH,)
    rubric = Rubric((exact, 1.0))
