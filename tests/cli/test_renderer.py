"""`prorl doctor --model DIR`, and a model server whose model nobody named."""

from __future__ import annotations

import socket
from pathlib import Path

import orjson
import pytest

from prorl.cli.commands.doctor import lines, spec_of
from prorl.cli.job import JobPlan
from prorl.errors import ConfigError
from prorl.renderer import describe, make_renderer
from tests.renderer.small_model import write_model


def test_proved_properties_of_a_renderer_are_printed(tmp_path: Path) -> None:
    spec = spec_of(
        write_model(tmp_path), ("variables.enable_thinking=true", "on_history_rewrite=segment")
    )
    assert (spec.variables, spec.on_history_rewrite) == ({"enable_thinking": True}, "segment")
    text = "\n".join(lines(describe(make_renderer(spec), spec)))
    for word in ("TemplateRenderer", "hermes", "enable_thinking", "<|im_end|>", "drops thoughts"):
        assert word in text


def test_a_model_server_needs_its_models_directory(tmp_path: Path) -> None:
    task = {"task_id": "t", "env": "math", "prompt": "?", "data": {"answer": "1"}}
    (tmp_path / "tasks.jsonl").write_bytes(orjson.dumps(task))
    with socket.create_server(("127.0.0.1", 0)) as server:
        flags = {
            "tasks": str(tmp_path / "tasks.jsonl"),
            "policy": f"http://127.0.0.1:{server.getsockname()[1]}",
        }
        with pytest.raises(ConfigError, match=r"add --set run\.renderer\.model=DIR"):
            JobPlan.make(None, flags, (), root=tmp_path / "root", resume=False)
        named = JobPlan.make(
            None, flags, ("run.renderer.model=somewhere",), root=tmp_path / "root", resume=False
        )
    assert named.run.renderer.model == "somewhere"
