"""Envs with turns of their own through a real service: what the env says is context, its state is
a column, and a replay of the stored run is the live stream.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from prorl.backends.embedded import TOY
from prorl.cli.app import dispatch
from prorl.config.renderer import RendererSpec
from prorl.deploy.running import Stop, client_of, service
from prorl.errors import UserError
from prorl.protocols import Renderer
from prorl.renderer.load import make_renderer
from prorl.types import Message, SpanKind, Task, ToolSpec
from tests.envs import guessing_env
from tests.integration.conftest import SLOW_IN_A_SINGLE_PROCESS
from tests.integration.run_checks import check_complete, rows
from tests.integration.services import settings
from tests.integration.test_stream import read, replay

ENV = f"{guessing_env.__file__}:Guessing"
GROUPS, N = 3, 2


@SLOW_IN_A_SINGLE_PROCESS
async def test_what_an_env_says_is_context_and_a_replay_is_equal(
    tmp_path: Path, workers: int, sandbox_kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    more = {"load_code": True, "tokenizer": str(TOY)}
    config = settings(tmp_path / "root", sandbox_kind, "scripted:oracle", workers=workers, **more)
    tasks = [
        Task(task_id=str(i), env=ENV, prompt="Which number?", data={"number": i + 40})
        for i in range(GROUPS)
    ]
    async with service(config, Stop()) as running:
        client = client_of(running)
        await asyncio.to_thread(
            client.create_run, run_id="other", agent="command: python3 agent.py"
        )
        with pytest.raises(UserError, match="has turns of its own, which the agent 'command: pyth"):
            await asyncio.to_thread(client.submit, "other", tasks, 1, key="k")
        await asyncio.to_thread(client.create_run, run_id="r", delivery="stream")
        await asyncio.to_thread(client.submit, "r", tasks, N, key="k", last=True)
        live, cursors = await asyncio.to_thread(read, client)
        await asyncio.to_thread(client.commit, cursors[-1])
        client.close()
    assert len(live) == GROUPS * N
    directory = tmp_path / "root" / "r"
    stored = check_complete(directory, GROUPS * N)
    counts = rows(
        stored,
        "select reward, stop_reason, num_turns, num_tool_calls, env_state, count(*) as n,"
        " sum((env_state->>'wrong')::int) as wrong from rollouts group by all",
    )
    assert counts == [
        {
            "reward": 0.5,
            "stop_reason": "done",
            "num_turns": 3,
            "num_tool_calls": 1,
            "env_state": '{"hints":1,"wrong":1}',
            "n": GROUPS * N,
            "wrong": GROUPS * N,
        }
    ]
    renderer = make_renderer(RendererSpec().settled(str(TOY), 0.0))
    sequences = rows(
        stored,
        "select s.*, r.task_id from sequences s join rollouts r using (rollout_id) order by 1, 2",
    )
    for row in sequences:
        messages = rows(
            stored,
            f"select role, content, turn from messages where rollout_id = {row['rollout_id']}"
            " order by index",
        )
        _check_ids(renderer, row, messages, 40 + int(row["task_id"]))
    assert len(sequences) == GROUPS * N
    copy = tmp_path / "copy"
    shutil.copytree(directory, copy)
    with replay(copy) as replayed:
        assert await asyncio.to_thread(read, replayed) == (live, cursors)
    capsys.readouterr()
    words = ["eval", "--stored", "r", "--name", "again", "--sandbox", sandbox_kind, "--json"]
    code = await asyncio.to_thread(dispatch, [*words, "--root", str(tmp_path / "root")])
    again = json.loads(capsys.readouterr().out)
    assert (code, again["scored"], again["mean_reward"]) == (0, GROUPS * N, 0.5)


def _check_ids(
    renderer: Renderer, row: dict[str, object], messages: list[dict[str, object]], number: int
) -> None:
    """The ids are the first prompt's, then what was sampled and what the renderer puts behind it;
    only what was sampled trains.
    """
    env = guessing_env.Guessing()
    task = Task(task_id="x", env="guessing", prompt="Which number?", data={"number": number})
    tools: tuple[ToolSpec, ...] = env.tools(task)
    hint, low, right = env.reference(task).calls[0], str(number - 1), str(number)
    roles = ["user", "assistant", "tool", "assistant", "user", "assistant", "grader"]
    assert [message["role"] for message in messages] == roles
    result = Message(role="tool", content=str(messages[2]["content"]), name="hint")
    response = Message(role="user", content=str(messages[4]["content"]))
    assert response.content.startswith("1: higher ")
    sampled = [
        renderer.completion(Message(role="assistant", content="", tool_calls=(hint,))),
        renderer.completion(Message(role="assistant", content=low)),
        renderer.completion(Message(role="assistant", content=right)),
    ]
    parts = [
        (SpanKind.CONTEXT, renderer.prompt(env.messages(task), tools)),
        (SpanKind.TRAINED, sampled[0]),
        (SpanKind.CONTEXT, renderer.bridge(sampled[0], [result])),
        (SpanKind.TRAINED, sampled[1]),
        (SpanKind.CONTEXT, renderer.bridge(sampled[1], [response])),
        (SpanKind.TRAINED, sampled[2]),
    ]
    assert row["token_ids"] == np.concatenate([ids for _, ids in parts]).tolist()
    assert row["span_end"] == np.cumsum([len(ids) for _, ids in parts]).tolist()
    assert row["span_kind"] == [kind for kind, _ in parts]
    assert row["span_turn"] == [0, 0, 1, 1, 2, 2]
    assert len(row["logprobs"]) == sum(map(len, sampled))  # type: ignore[arg-type]
