"""An env of one's own: what its author got wrong is said in words, before a policy is blamed."""

from __future__ import annotations

import pytest

from prorl.envs.base import BaseEnv, tool
from prorl.errors import ConfigError, RolloutError, TaskError
from prorl.testing import make_task, run
from prorl.types import Json, Task, ToolCall


class Failing(BaseEnv):
    @tool("Look up a word.", word={"type": "string"})
    def look_up(self, task: Task, word: str) -> str:
        raise KeyError(word)


def test_a_tool_has_to_declare_exactly_the_arguments_that_it_takes() -> None:
    def look_up(self: BaseEnv, task: Task, word: str, much: bool = False) -> str:
        return word

    tool("Look up a word.", word={"type": "string"})(look_up)
    tool("Look up a word.", word={"type": "string"}, much={"type": "boolean"})(look_up)
    mistold: tuple[dict[str, Json], ...] = (
        {},
        {"wrd": {"type": "string"}},
        {"word": {}, "more": {}},
    )
    for declaration in mistold:
        with pytest.raises(ConfigError, match="'look_up' takes word, much"):
            tool("Look up a word.", **declaration)(look_up)


def test_what_a_tool_raises_names_the_tool() -> None:
    with pytest.raises(RolloutError, match="tool look_up: KeyError: 'Oslo'"):
        run(Failing(), make_task("failing"), ToolCall("look_up", {"word": "Oslo"}))


def test_a_rubric_of_another_type_is_refused() -> None:
    class Listing(BaseEnv):
        rubric = ()  # type: ignore[assignment]

    with pytest.raises(TaskError, match=r"rubric of env 'listing' is a tuple; expected Rubric"):
        Listing().check(make_task("listing"))
