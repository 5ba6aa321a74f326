"""A user's renderer answers from a helper: the ids of an attempt are those of the same renderer of
ours, and what its code does wrong is its task's failure, in its words.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from prorl.agents.native import NativeAgent
from prorl.backends import open_backend
from prorl.config.renderer import RendererSpec
from prorl.envs import get_env
from prorl.errors import ConfigError, TaskError
from prorl.helper.pool import close
from prorl.renderer import apart
from prorl.renderer.apart import UsersRenderer, open_renderer
from prorl.renderer.check import check
from prorl.testing import Replies
from prorl.types import FailureCode, RolloutLimits
from tests.agents.test_native import ToolEnv, context
from tests.agents.test_resume import REPLIES, check_same

RENDERER = """
import os, signal, sys, time
from prorl.renderer import ChatMLRenderer
from prorl.tokenizer import ByteTokenizer

class Mine(ChatMLRenderer):
    def prompt(self, messages, tools):
        ids = super().prompt(messages, tools)
        how = messages[-1].content
        if how == "raise":
            raise LookupError("no such city")
        if how == "leave":
            sys.exit("enough")
        if how == "exit":
            os._exit(3)
        if how == "block":
            time.sleep(600)
        if how == "foreign":
            return ids + 1000
        if how == "floats":
            return ids / 2
        if how == "kill the parent":
            os.kill(os.getppid(), signal.SIGKILL)
        return ids

def make(spec):
    return Mine(ByteTokenizer())

def refuse(spec):
    raise RuntimeError("no licence")
"""


@pytest.fixture
def spec(tmp_path: Path) -> Iterator[str]:
    path = tmp_path / "mine.py"
    path.write_text(RENDERER)
    loaded = set(sys.modules)
    yield RendererSpec(model="bytes", name=f"{path}:make").to_json()
    assert not [name for name in set(sys.modules) - loaded if "prorl_user_mine" in name]


async def test_an_attempt_with_a_users_renderer_leaves_the_same_ids(spec: str) -> None:
    limits = RolloutLimits(max_tokens=1 << 14)
    mine = await open_renderer(spec)
    assert isinstance(mine, UsersRenderer)
    ours, theirs = [
        await NativeAgent().run(context(Replies(*REPLIES), ToolEnv(), limits, **changes))
        for changes in ({}, {"renderer": mine, "renderer_spec": spec})
    ]
    check_same(theirs, ours)
    oracle = open_backend("scripted:noop", mine, get_env)
    trajectory = await NativeAgent().run(context(oracle, renderer=mine, renderer_spec=spec))
    assert trajectory.artifact == b"I do not know."


SAYS = {
    "raise": r"LookupError: no such city \(.*mine.py:\d+ in prompt\)",
    "leave": r"SystemExit: enough \(.*mine.py:\d+ in prompt\)",
    "exit": r"ended its process \(exit code 3\)",
    "block": r"took longer than 1 s \(.*mine.py:\d+ in prompt\)",
    "foreign": r"prompt gave an id that is not in its vocabulary; expected ids from 0 to 264",
    "floats": r"prompt gave array",
    "kill the parent": r"PermissionError",
}


@pytest.mark.parametrize("how", SAYS)
async def test_what_a_users_renderer_does_wrong_is_its_tasks_failure(
    spec: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(apart, "USERS_S", 1.0 if how == "block" else 20.0)
    mine = await open_renderer(spec)
    attempt_context = context(Replies(), renderer=mine, renderer_spec=spec)
    attempt_context.messages = [replace(attempt_context.messages[-1], content=how)]
    failure = (await NativeAgent().run(attempt_context)).failure
    assert failure.code is FailureCode.BAD_TASK, failure
    assert re.search(SAYS[how], failure.message), failure


async def test_a_renderer_that_cannot_be_made_is_refused_before_its_run(spec: str) -> None:
    refused = RendererSpec.from_json(spec.replace(":make", ":refuse"))
    with pytest.raises(ConfigError, match="no licence"):
        await check(refused)
    with pytest.raises((ConfigError, TaskError), match="no licence"):
        await open_renderer(refused.to_json())
    close()
