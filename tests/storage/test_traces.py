"""Rollouts of other frameworks become a run: what they have is there, what they lack is absent."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest

from prorl.analysis.export import atif
from prorl.analysis.foreign import Line, read_lines
from prorl.analysis.importing import import_rows
from prorl.analysis.traces import read_dump
from prorl.errors import UserError
from prorl.storage.read.catalog import StoredRun
from prorl.storage.read.verify import verify
from prorl.types import Json
from prorl.view.opened import Opened
from prorl.view.tokens import Pieces, tokens
from tests.storage.compacting import run_of_many_parts

ASKED = {"role": "user", "content": "1+1?"}
CALL = {"name": "python", "arguments": '{"code": "1+1"}'}
LOGPROBS = [-0.5, -0.25]

ATIF: Json = {
    "schema_version": "ATIF-v1.8",
    "session_id": "s",
    "agent": {"name": "terminus-2", "version": "1"},
    "steps": [
        {"step_id": 1, "source": "user", "message": "1+1?"},
        {
            "step_id": 2,
            "source": "agent",
            "message": "",
            "reasoning_content": "hm",
            "tool_calls": [
                {"tool_call_id": "c", "function_name": "python", "arguments": {"code": "1+1"}}
            ],
            "observation": {"results": [{"source_call_id": "c", "content": "2"}]},
            "metrics": {
                "prompt_token_ids": [1, 2],
                "completion_token_ids": [3, 4],
                "logprobs": LOGPROBS,
            },
        },
        {
            "step_id": 3,
            "source": "agent",
            "message": "2",
            "metrics": {
                "prompt_token_ids": [1, 2, 3, 4, 9],
                "completion_token_ids": [5, 6],
                "logprobs": LOGPROBS,
            },
        },
    ],
}
GYM: Json = {
    "_ng_task_index": 4,
    "reward": 1.0,
    "responses_create_params": {"input": [ASKED]},
    "response": {
        "output": [
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]},
            {
                "type": "function_call",
                "call_id": "c",
                **CALL,
                "prompt_token_ids": [1, 2],
                "generation_token_ids": [3, 4],
                "generation_log_probs": LOGPROBS,
            },
            {"type": "function_call_output", "call_id": "c", "output": "2"},
            {
                "type": "message",
                "role": "assistant",
                "content": [{"type": "output_text", "text": "2"}],
                "prompt_token_ids": [1, 2, 3, 4, 9],
                "generation_token_ids": [5, 6],
                "generation_log_probs": LOGPROBS,
            },
        ]
    },
}
NODES: Json = [
    {"parent": None, "message": ASKED, "token_ids": [1, 2], "mask": [False, False]},
    {
        "parent": 0,
        "sampled": True,
        "message": {
            "role": "assistant",
            "content": None,
            "reasoning_content": "hm",
            "tool_calls": [{"id": "c", **CALL}],
        },
        "token_ids": [3, 4],
        "mask": [True, True],
        "logprobs": LOGPROBS,
    },
    {
        "parent": 1,
        "message": {"role": "tool", "tool_call_id": "c", "content": "2"},
        "token_ids": [9],
        "mask": [False],
    },
    {
        "parent": 2,
        "sampled": True,
        "message": {"role": "assistant", "content": "2"},
        "token_ids": [5, 6],
        "mask": [True, True],
        "logprobs": LOGPROBS,
    },
]
VERIFIERS: Json = {
    "env": {"id": "gsm8k"},
    "group": {"id": "g"},
    "traces": [
        {
            "id": "t",
            "task": {"type": "Row", "data": {}, "key": "k"},
            "nodes": NODES,
            "rewards": {"right": {"score": 1.0, "weight": 1.0}, "short": {"score": 4, "weight": 0}},
            "stop_condition": "done",
        }
    ],
}
SAID: Json = [node["message"] for node in NODES]
OPENENV: Json = {
    "session_id": "s",
    "capture_level": "tokens",
    "metadata": {"reward": 1.0, "task_id": "k"},
    "turns": [
        {"node_id": "a"},
        {"node_id": "b", "request_messages": SAID[:3], "response_message": SAID[3]},
    ],
    "sequences": [
        {"role": "auxiliary", "node_ids": ["x"], "n_turns": 1, "input_ids": [7], "loss_mask": [0],
         "logprobs": [0.0]},
        {
            "role": "agent",
            "node_ids": ["a", "b"],
            "n_turns": 2,
            "input_ids": [1, 2, 3, 4, 9, 5, 6],
            "loss_mask": [0, 0, 1, 1, 0, 1, 1],
            "logprobs": [0.0, 0.0, *LOGPROBS, 0.0, *LOGPROBS],
        },
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("theirs", "reward"),
    [(ATIF, None), (GYM, 1.0), (VERIFIERS, 1.0), (OPENENV, 1.0)],
    ids=["atif", "gym", "verifiers", "openenv"],
)
def test_words_and_ids_of_others(tmp_path: Path, theirs: Json, reward: float | None) -> None:
    file = tmp_path / "theirs.jsonl"
    file.write_bytes(orjson.dumps(theirs) + b"\n" + orjson.dumps(theirs))
    expected = 1 if theirs is VERIFIERS else 2  # the same trace twice is one rollout
    if theirs is VERIFIERS:
        with pytest.raises(UserError, match="comes twice"):
            import_rows(read_lines(file), tmp_path / "run", "x")
        file.write_bytes(orjson.dumps(theirs))
    assert import_rows(read_lines(file), tmp_path / "run", "x") == expected
    assert verify(tmp_path / "run") == []
    opened = Opened(str(tmp_path / "run"))
    found = opened.rollout(0)
    assert [message["role"] for message in found["messages"]] == [
        *("user", "assistant", "tool", "assistant")
    ]
    assert [message["content"] for message in found["messages"]] == ["1+1?", "", "2", "2"]
    assert found["messages"][1]["reasoning"] == "hm"
    assert orjson.loads(found["messages"][1]["tool_calls"]) == [
        {"id": "c", "name": "python", "arguments": {"code": "1+1"}}
    ]
    row = found["rollout"]
    assert (row["reward"], row["valid"]) == (reward, reward is not None)
    assert (row["num_tool_calls"], row["num_sequences"], row["num_sampled"]) == (1, 1, 4)
    (sequence,) = tokens(opened, Pieces("bytes"), 0)["sequences"]
    assert sequence["ids"].tolist() == [1, 2, 3, 4, 9, 5, 6]
    assert sequence["span_end"].tolist() == [2, 4, 5, 7]
    assert sequence["logprobs"].tolist() == [*LOGPROBS, *LOGPROBS]


def test_a_call_that_does_not_go_on_begins_a_sequence(tmp_path: Path) -> None:
    other: Json = orjson.loads(orjson.dumps(ATIF))
    other["steps"][2]["metrics"]["prompt_token_ids"] = [1, 8]
    import_rows([Line("x:1", other)], tmp_path / "run", "x")
    (one, two) = StoredRun(tmp_path / "run").read("sequences").to_pylist()
    assert (one["token_ids"], two["token_ids"]) == ([1, 2, 3, 4], [1, 8, 5, 6])
    assert (one["weight"], two["segment"]) == (0.5, 1)


@pytest.mark.parametrize("lost", ["logprobs", "prompt_token_ids"])
def test_what_they_lack_is_absent(tmp_path: Path, lost: str) -> None:
    less: Json = orjson.loads(orjson.dumps(ATIF))
    del less["steps"][2]["metrics"][lost]
    import_rows([Line("x:1", less)], tmp_path / "run", "x")
    stored = StoredRun(tmp_path / "run")
    assert stored.read("sequences").num_rows == 0
    (row,) = stored.read("rollouts").to_pylist()
    assert (row["num_tokens"], row["min_version"], row["logprob_sum"]) == (0, -1, None)
    assert stored.read("messages").num_rows == 4
    assert verify(tmp_path / "run") == []


@pytest.mark.parametrize(
    "theirs",
    [
        {"episode_id": "e", "messages": SAID, "reward": 1.0, "done": True},
        {"example_id": 3, "prompt": SAID[:1], "completion": SAID[1:], "reward": 1.0},
    ],
)
def test_words_alone(tmp_path: Path, theirs: Json) -> None:
    import_rows([Line("x:1", theirs), Line("x:2", theirs)], tmp_path / "run", "x")
    opened = Opened(str(tmp_path / "run"))
    assert [one["sample_index"] for one in opened.rollout(1)["siblings"]] == [0, 1]
    assert tokens(opened, Pieces("bytes"), 0)["sequences"] == []
    assert opened.ask("select name from tool_calls")[0] == {"name": "python"}


def test_our_own_atif_comes_back(tmp_path: Path) -> None:
    run = run_of_many_parts(tmp_path, "r")
    stored = StoredRun(run.root)
    lines = [Line(f"x:{n}", row) for n, row in enumerate(atif(stored))]
    assert import_rows(lines, tmp_path / "back", "atif") == len(lines)
    ours = {row["rollout_id"]: row for row in stored.read("rollouts").to_pylist()}
    for row in StoredRun(tmp_path / "back").read("rollouts").to_pylist():
        there = ours[row["rollout_id"]]
        names = ("reward", "group_id", "num_sampled")
        assert [row[name] for name in names] == [there[name] for name in names]


def test_a_dump_of_slime(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="no torch")
    sample = {
        "group_index": 0,
        "index": 0,
        "prompt": "1+1?",
        "tokens": [1, 2, 3, 4, 5],
        "response": "2",
        "response_length": 3,
        "loss_mask": [1, 0, 1],
        "rollout_log_probs": [-0.5, 0.0, -0.25],
        "reward": 1.0,
        "status": "completed",
    }
    held = [sample, {**sample, "rollout_log_probs": None, "reward": {"a": 1}}]
    torch.save({"rollout_id": 0, "samples": held}, tmp_path / "0.pt")
    import_rows(read_dump(tmp_path / "0.pt"), tmp_path / "run", "0.pt")
    stored = StoredRun(tmp_path / "run")
    (sequence,) = stored.read("sequences").to_pylist()
    assert sequence["token_ids"] == [1, 2, 3, 4, 5]
    assert sequence["logprobs"] == LOGPROBS
    assert stored.read("rollouts").column("reward").to_pylist() == [1.0, None]
    (tmp_path / "1.pt").write_bytes(b"no pickle")
    with pytest.raises(UserError, match="slime"):
        list(read_dump(tmp_path / "1.pt"))
