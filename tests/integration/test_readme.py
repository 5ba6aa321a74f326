"""The README's trainer runs as it stands there, against a real service."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from prorl.config import ServiceConfig
from prorl.deploy.running import Stop, in_thread, service

README = Path(__file__).parents[2] / "README.md"
URL, TASKS = "http://127.0.0.1:7700", "train.jsonl"


async def test_your_trainer_in_ten_lines(
    tmp_path: Path, sandbox_kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch", reason="the example hands out torch tensors (extra `torch`)")
    found = re.search(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert found
    code = found[1]
    assert URL in code
    assert TASKS in code
    rows = [
        {
            "question": f"What is {i} + {i}?",
            "answer": f"It is <<{i}+{i}={2 * i}>>{2 * i}.\n#### {2 * i}",
        }
        for i in range(1, 9)
    ]
    (tmp_path / TASKS).write_text("\n".join(json.dumps(row) for row in rows))
    values = {
        "root": tmp_path / "root",
        "topology": "inline",
        "backends": ("scripted:flaky",),
        "sandbox": {"kind": sandbox_kind},
    }
    async with service(ServiceConfig.model_validate(values), Stop()) as running:
        monkeypatch.setenv("PRORL_TOKEN", running.config.token)
        saved: list[str] = []
        trained: list[int] = []

        def step(tensors: object) -> float:
            trained.append(int(tensors.token_ids.numel()))  # type: ignore[attr-defined]
            return 0.0

        names = {"step": step, "save_checkpoint": lambda loss, cursor: saved.append(cursor)}
        code = code.replace(URL, running.url).replace(TASKS, str(tmp_path / TASKS))
        await in_thread(exec, compile(code, "README.md", "exec"), names)
    assert trained
    assert all(trained)
    seqs = [int(cursor.removeprefix("mine@")) for cursor in saved]
    assert seqs == sorted(set(seqs))
    assert seqs[:-1] == list(range(2, 2 * len(seqs), 2))
