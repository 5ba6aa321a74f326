"""`prorl run --tasks FOLDER --agent PROGRAM`: real programs on a Harbor task, whose image has them.

The model is a script behind HTTP that keeps what it was asked for and what it replied: `make
test-adapters`.
"""

from __future__ import annotations

import asyncio
import os
import runpy
import shutil
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prorl.agents.programs import program_of
from prorl.cli.job import JobPlan
from prorl.cli.run_job import run_plan
from prorl.renderer import ChatMLRenderer
from prorl.sandbox.images.layers import LayerRecipe, make_layer
from prorl.sandbox.images.registry import Registry
from prorl.sandbox.kinds import load
from prorl.sandbox.launch.spec import interpreter
from prorl.storage.read.catalog import StoredRun
from prorl.storage.read.verify import verify
from prorl.tokenizer import SPECIALS, ByteTokenizer
from prorl.types import Message
from tests.agents.test_real_programs import CASES, LAYERS
from tests.harbor_folders import TOML, make_folder
from tests.sandbox import small_image
from tests.sandbox.conftest import short_folder

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not LAYERS, reason="no programs (PRORL_PROGRAMS): make test-adapters"),
]
RENDERER = ChatMLRenderer(ByteTokenizer())
TURN = "<|im_start|>assistant"
START = 256 + SPECIALS.index("<|im_start|>")
HEADER = len("assistant\n")
TOKENS = runpy.run_path(str(Path(__file__).parents[2] / "configs" / "servers" / "tokens.py"))
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
PROGRAMS = (*small_image.PROGRAMS, "chmod", "env", "head", "mkdir", "mktemp", "tail")
OPT = "/opt/program"


class Script:
    """A model whose next token is that of a script; on what is no chat it is a table, since prorl
    tries a server with such prompts before it trusts it.
    """

    def __init__(self, replies: Sequence[Message]) -> None:
        self._replies, self._table = replies, TOKENS["Table"]()
        self._reply: list[int] = []
        self.calls: list[tuple[list[int], list[int]]] = []
        """Prompts and replies of the whole run, which is one rollout."""

    def logits(self, ids: list[int]) -> Any:
        if START not in ids:
            return self._table.logits(ids)
        begin = len(ids) - ids[::-1].index(START) + HEADER
        if begin == len(ids):
            self._reply = self._next(ids)
            self.calls.append((list(ids), self._reply))
        logits = np.full(TOKENS["VOCAB_SIZE"], -1e9)
        logits[self._reply[len(ids) - begin]] = 0.0
        return logits

    def _next(self, prompt: list[int]) -> list[int]:
        text = RENDERER.tokenizer.decode(np.array(prompt, dtype=np.int32))
        reply = Message(role="assistant", content="A title.")
        if "# Tools" in text:
            reply = self._replies[min(text.count(TURN) - 1, len(self._replies) - 1)]
        return [int(token) for token in RENDERER.completion(reply)]


@contextmanager
def serving(script: Script) -> Iterator[str]:
    handler = type("Scripted", (TOKENS["Handler"],), {"model": script})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def image_with(folder: Path, name: str) -> Path:
    """An image as a Dockerfile with `RUN npm install` or `pip install` would make it."""
    program = program_of(name)
    assert program is not None
    registry = Registry(Path(LAYERS) / "prorl" / "images")
    registry.open()
    recipe = LayerRecipe(program.requirements, "")
    layer = make_layer(registry, recipe.job())
    image = small_image.make_image(folder, PROGRAMS)
    tree = registry.root / "images" / layer.digest
    shutil.copytree(tree, image / OPT[1:], symlinks=True, copy_function=os.link)
    python = Path(interpreter())  # a layer's own Python is a link to it
    for path in (python, python.parents[1] / f"lib/{python.name}"):
        target = image / str(path)[1:]
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            shutil.copytree(path, target, ignore=shutil.ignore_patterns("site-packages", "test"))
        else:
            shutil.copy(path, target)
    modules = [*tree.rglob("site-packages/**/*.so"), *python.parents[1].glob("lib/*/lib-dynload/*")]
    for path in (*(tree / "bin").iterdir(), *modules):
        ldd = subprocess.run(["ldd", path.resolve()], capture_output=True, text=True, check=False)
        for library in filter(os.path.isabs, ldd.stdout.split()):  # none of a script
            target = image / library[1:]
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(library, target)
    return image


@pytest.mark.parametrize("name", ["codex", "claude-code", "mini-swe-agent", "pi"])
def test_reward_and_ids_of_a_harbor_task_are_those_of_the_recording(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", LAYERS)
    if missing := load("pyns").missing():
        pytest.skip(missing)
    case = CASES[name]
    submit = (
        case.call(SUBMIT)
        if name == "mini-swe-agent"
        else Message(role="assistant", content="Done.")
    )
    with short_folder(0o755) as folder:
        image = image_with(folder, name)
        toml = TOML.replace("[environment]\n", f'[environment]\ndocker_image = "{image}"\n')
        toml = toml.replace(
            "memory_mb = 512\nstorage_mb = 64", "memory_mb = 4096\nstorage_mb = 512"
        )
        toml += f'[environment.env]\nPATH = "{OPT}/bin:/usr/bin:/bin"\n'
        make_folder(tmp_path / "tasks" / "sum", **{"task.toml": toml})
        script = Script((case.call("echo 5 > sum.txt"), submit))
        with serving(script) as url:
            flags = {
                "tasks": str(tmp_path / "tasks"),
                "policy": url,
                "name": "r",
                "run": {"agent": name, "limits": {"max_tokens": 1 << 20}},
                "service": {"workers": 0, "tokenizer": "bytes", "sandbox": {"kind": "pyns"}},
            }
            plan = JobPlan.make(None, flags, [], root=tmp_path / "root")
            assert asyncio.run(run_plan(plan, json=True)) == 0
    run = StoredRun(tmp_path / "root" / "r")
    (rollout,) = run.read("rollouts").to_pylist()
    assert rollout["reward"] == 1.0, rollout["failure_message"]
    assert rollout["retokenization_mismatches"] == 0
    sequences = [row["token_ids"] for row in run.read("sequences").to_pylist()]
    exact = [
        any(ids[: len(prompt) + len(reply)] == prompt + reply for ids in sequences)
        for prompt, reply in script.calls
    ]
    print(f"{name}: {sum(exact)} of {len(script.calls)} calls exact, {len(sequences)} sequences")
    assert all(exact)
    assert len(script.calls) == rollout["num_turns"]
    assert verify(tmp_path / "root" / "r") == []
