"""`make rivals`: what its programme does without the rivals' environments."""

from __future__ import annotations

import doctest
import importlib.util
import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

RIVALS = Path(__file__).parents[2] / "configs" / "rivals"


@pytest.fixture(scope="module")
def run() -> ModuleType:
    spec = importlib.util.spec_from_file_location("rivals_run", RIVALS / "run.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def programme(folder: Path, *words: str, **variables: str) -> list[str]:
    env = os.environ | {"RIVALS_RESULTS": str(folder)} | variables
    argv = [sys.executable, str(RIVALS / "run.py"), *words]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def row(run: ModuleType, **more: Any) -> dict[str, Any]:
    settings = {"commit": run.commit(), "tasks": 48, "in_flight": 32, "machine": run.machine()}
    seen = {"player": "skyrl", "fault": "", "turn": 0, "others": 0.0, "idle": 0.5, "rate": 3.0}
    seen |= {"cpu_ms": 5.0, "peak_mb": 64.0, "lost": 0, "twice": 0, "wrong": 0}
    return settings | seen | more


def test_lost_work_and_waits(run: ModuleType) -> None:
    assert doctest.testmod(run).failed == 0
    assert run.longest_wait(1.0, [1.5, 4.0, 4.1]) == 2.5
    again = [[100, 0, float(at), 2.0, at + 2.0] for at in range(6)]  # asked for by four
    assert run.lost_work(again, 2.5, 2.5)["again_s"] == 4.0


def test_a_cut_programme_goes_on_where_it_was(run: ModuleType, tmp_path: Path) -> None:
    stale = row(run, turn=1, commit="another")
    rows = [row(run), row(run, turn=2), stale]
    (tmp_path / "cells.jsonl").write_text("".join(json.dumps(cell) + "\n" for cell in rows))
    output = programme(tmp_path, "clean", "skyrl", RIVALS_BUDGET_S="0")
    assert [line for line in output if line.startswith("no time left")] == [
        "no time left for Cell(player='skyrl', fault='', turn=1)"
    ]


def test_clock_figures_are_printed_for_quiet_cores_only(run: ModuleType) -> None:
    quiet, loud = row(run), row(run, turn=1, others=0.5)
    assert "| 3.0 | 50% |" in run.table([quiet])
    assert "rollouts a second are left out" in run.table([quiet, loud])
    assert "| 3.0 | 50% |" not in run.table([quiet, loud])
    without_fault = row(run, fault="trainer", struck_at=0.0)
    assert "| skyrl | trainer | did not happen |" in run.table([without_fault])


def test_the_model_replies_at_once_and_as_a_stream(run: ModuleType, tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "[17] Work out the chain that starts at 17."}]

    def ask(url: str, **more: Any) -> str:
        body = json.dumps({"model": "policy", "messages": messages, **more}).encode()
        request = urllib.request.Request(
            f"{url}/v1/chat/completions", body, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=30) as reply:
            return str(reply.read().decode())

    with run.model(tmp_path) as (_, url):
        whole = json.loads(ask(url))["choices"][0]["message"]["tool_calls"][0]
        events = [line[6:] for line in ask(url, stream=True).splitlines() if line]
        with urllib.request.urlopen(f"{url}/calls", timeout=30) as reply:
            calls = json.loads(reply.read())
    assert json.loads(whole["function"]["arguments"]) == {"command": "echo $((17 * 3 + 0))"}
    assert events.pop() == "[DONE]"
    first, last, used = map(json.loads, events)
    assert first["choices"][0]["delta"]["tool_calls"][0]["function"] == whole["function"]
    assert last["choices"][0]["finish_reason"] == "tool_calls"
    assert used["usage"]["total_tokens"] == 120
    assert [(task, turn) for task, turn, *_ in calls] == [(17, 0), (17, 0)]
    assert all(ended - came >= takes_s for _, _, came, takes_s, ended in calls)


@pytest.mark.slow
def test_prorl_plays_whole_and_with_a_killed_service(run: ModuleType, tmp_path: Path) -> None:
    programme(
        tmp_path, "all", "prorl", RIVALS_TASKS="8", RIVALS_REPEATS="1", RIVALS_FAULTS="service"
    )
    rows = [json.loads(line) for line in (tmp_path / "cells.jsonl").read_text().splitlines()]
    assert [(row["fault"], row["rollouts"]) for row in rows] == [("", 32), ("service", 16)]
    assert all(row["lost"] == row["twice"] == row["wrong"] == 0 for row in rows)
    assert rows[1]["struck_at"]
    assert "| prorl | service | 0 | 0 | 0 |" in (tmp_path / "table.md").read_text()
