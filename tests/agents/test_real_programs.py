"""Programs of the real packages, unmodified, in sandboxes without network: `make test-adapters`.

Each mends a repository by what a scripted policy tells it to do.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import orjson
import pytest

from prorl.agents import get_agent
from prorl.agents.capture.reading import LIGHT_BYTES, PROGRAM, read
from prorl.agents.context import AttemptContext
from prorl.agents.programs import program_of
from prorl.backends.embedded import TOY
from prorl.backends.vllm import VllmBackend
from prorl.envs import get_env
from prorl.limits import Deadline
from prorl.linux import procfs
from prorl.tasks import load_tasks
from prorl.testing import RENDERER, isolated, play, sampled
from prorl.types import (
    AttemptKey,
    Completion,
    GenerateRequest,
    Json,
    Message,
    RolloutLimits,
    SamplingParams,
    Sequence,
    SpanKind,
    Stage,
    Task,
    ToolCall,
)
from tests.backends.embedded.helpers import RENDERER as TOYS
from tests.backends.real_servers import VLLM_PYTHON, Server, embedded, serving, vllm

LAYERS = os.environ.get("PRORL_PROGRAMS", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),  # packages are installed by the first who asks
    pytest.mark.skipif(not LAYERS, reason="no programs (PRORL_PROGRAMS): make test-adapters"),
]
MEND = """sed -i 's/text.strip()/text.strip().replace(",", "")/' calc/parse.py; git diff"""
WHOLE = '''calc/parse.py
```
"""Numbers as people write them."""


def parse(text: str) -> int:
    """The integer that a text is. Raises ValueError."""
    return int(text.strip().replace(",", ""))
```
'''
PYDANTIC = """
import os, subprocess
from pydantic_ai import Agent
agent = Agent("anthropic:policy")
@agent.tool_plain
def bash(command: str) -> str:
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    return done.stdout + done.stderr
said = agent.run_sync(os.environ["PRORL_PROMPT"])
for _ in range(int(os.environ.get("MORE", 0))):
    said = agent.run_sync("Go on.", message_history=said.all_messages())
print(said.output)
"""
"""Speaks Messages."""
AGENTS = """
import os, subprocess
from agents import Agent, Runner, function_tool, set_tracing_disabled
set_tracing_disabled(True)
@function_tool
def bash(command: str) -> str:
    "Run a command."
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    return done.stdout + done.stderr
agent = Agent(name="mender", model="policy", tools=[bash])
said = Runner.run_sync(agent, os.environ["PRORL_PROMPT"])
for _ in range(int(os.environ.get("MORE", 0))):
    said = Runner.run_sync(agent, [*said.to_input_list(), {"role": "user", "content": "Go on."}])
print(said.final_output)
"""
"""Speaks Responses."""
ONE_CALL = """
import os, urllib.request
body = b'{"messages": [{"role": "user", "content": "Hello."}]}'
head = {"Content-Type": "application/json"}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
print(urllib.request.urlopen(urllib.request.Request(url, body, head)).read())
"""
CPU_OF_A_PROCESS = 2
"""clock_getcpuclockid(3): what is added to a pid's complement to name its clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A program, and what the policy says to make it run a command."""

    agent: str
    tool: str = "bash"
    argument: str = "command"
    more: Mapping[str, Json] | None = None
    last: str = "It is mended."
    requirements: tuple[str, ...] = ()
    calls: int = 3
    sequences: int = 1
    python: tuple[int, int] | None = None
    """The only Python that its packages take."""
    sdist: bool = False
    """True if not all of its packages have wheels."""

    def call(self, line: str) -> Message:
        arguments = {self.argument: line, **(self.more or {})}
        call = ToolCall(self.tool, arguments)
        return Message(role="assistant", content="I look.", tool_calls=(call,))


CASES = {
    "mini-swe-agent": Case(agent="mini-swe-agent"),
    "codex": Case(agent="codex", tool="exec_command", argument="cmd"),
    # its first call asks for a title
    "opencode": Case(agent="opencode", more={"description": "x"}, calls=4, sequences=2),
    "claude-code": Case(agent="claude-code", tool="Bash", more={"description": "x"}),
    "qwen-code": Case(
        agent="qwen-code",
        tool="run_shell_command",
        more={"description": "x", "is_background": False},
    ),
    "gemini-cli": Case(agent="gemini-cli", tool="run_shell_command"),
    "pi": Case(agent="pi"),
    "kimi-code": Case(agent="kimi-code", tool="Bash"),
    "hermes": Case(agent="hermes", tool="terminal"),
    "openhands": Case(
        agent="openhands",
        tool="terminal",
        more={"security_risk": "LOW"},
        python=(3, 12),
        sdist=True,
    ),
    # it tells its past anew in each call
    "aider": Case(agent="aider", tool="", calls=2, sequences=2),
    "pydantic-ai": Case(
        agent=f"command: python3 -c {shlex.quote(PYDANTIC)}",
        requirements=("pydantic-ai-slim[anthropic]==2.68.0",),
    ),
    "openai-agents": Case(
        agent=f"command: python3 -c {shlex.quote(AGENTS)}",
        requirements=("openai-agents==0.24.0",),
    ),
}


class Scripted:
    """Implements `prorl.protocols.Backend`: a conversation with tools gets its case's replies."""

    name = "scripted"

    def __init__(self, case: Case) -> None:
        self._case = case
        done = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
        last = case.call(done) if case.agent == "mini-swe-agent" else None
        ending = last or Message(role="assistant", content=case.last)
        self._replies = [case.call("ls"), case.call(MEND), ending]
        self.calls: list[tuple[np.ndarray, np.ndarray]] = []
        """Ids of each prompt and of its reply."""
        self.cpu_s = 0.0

    async def generate(self, request: GenerateRequest) -> Completion:
        began_s = time.process_time()
        completion = self._sample(request)
        self.calls.append((request.prompt_ids_L.copy(), completion.token_ids_C))
        self.cpu_s += time.process_time() - began_s
        return completion

    def _sample(self, request: GenerateRequest) -> Completion:
        prompt = RENDERER.tokenizer.decode(request.prompt_ids_L)
        if not self._case.tool:
            message = Message(role="assistant", content=WHOLE)
        elif "# Tools" in prompt:
            message = self._replies.pop(0)
        else:
            message = Message(role="assistant", content="A title.")
        return sampled(RENDERER.completion(message)[: request.sampling.max_tokens])

    async def close(self) -> None:
        pass


def wheels(agent: str) -> Path:
    """A folder with a wheel of each package that a program is made of, and of pytest."""
    folder = Path(LAYERS) / f"wheels-{agent}"
    program = program_of(agent)
    if not folder.exists() and program is not None:
        argv = [sys.executable, "-m", "pip", "wheel", "-q", "-w", f"{folder}.new"]
        subprocess.run([*argv, "pytest", *program.requirements], check=True)
        Path(f"{folder}.new").rename(folder)
    return folder


def task(case: Case) -> Task:
    calc = next(iter(load_tasks(str(Path(__file__).parents[1] / "envs" / "swe_tasks.jsonl"))))
    if not case.requirements and not case.sdist:
        return calc
    folder = str(wheels(case.agent)) if case.sdist else ""
    return replace(
        calc,
        data={**calc.data, "requirements": ["pytest", *case.requirements], "wheels": folder},
    )


def cpu_s() -> float:
    """Returns the CPU seconds of this process and of its helpers, but for sandboxes."""
    seconds = time.process_time()
    for pid in procfs.children(os.getpid()):
        with suppress(OSError):  # it has ended
            command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            is_helper = PROGRAM.module.encode() in command
            seconds += is_helper * time.clock_gettime(~pid << 3 | CPU_OF_A_PROCESS)
    return seconds


async def warm_up() -> None:
    """Starts what a worker starts once: the helper that reads long requests."""
    body = {"messages": [{"role": "user", "content": "x" * LIGHT_BYTES}]}
    await read("/chat/completions", orjson.dumps(body), 0.0)


@pytest.fixture(scope="module")
def has_played() -> Iterator[None]:
    """A rollout has been played, so that no other is charged with imports."""
    case = Case(agent=f"command: python3 -c {shlex.quote(ONE_CALL)}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", LAYERS)
        playing = play(
            get_env("swe"), task(case), Scripted(case), boxes=isolated(), agent=case.agent
        )
        assert len(asyncio.run(playing).trajectory.turns) == 1
        yield


@pytest.mark.usefixtures("has_played")
@pytest.mark.parametrize("name", CASES)
async def test_it_mends_a_repository(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", LAYERS)
    case = CASES[name]
    if case.python not in {None, sys.version_info[:2]}:
        pytest.skip(f"{name} is for Python {case.python} only")
    backend = Scripted(case)
    limits = RolloutLimits(run_s=300.0, max_turns=30, max_tokens=1 << 20)
    await warm_up()
    began_s = cpu_s()
    played = await play(
        get_env("swe"), task(case), backend, boxes=isolated(), limits=limits, agent=case.agent
    )
    cpu_ms = 1e3 * (cpu_s() - began_s - backend.cpu_s) / len(backend.calls)
    trajectory, last = played.trajectory, played.trajectory.messages[-1].content
    exact = [
        any(
            np.array_equal(sequence.token_ids_L[: len(prompt) + len(reply)], [*prompt, *reply])
            for sequence in trajectory.sequences
        )
        for prompt, reply in backend.calls
    ]
    # INIT, RUN and EVAL of the rollout, without sandboxes and sampling
    print(f"{name}: {sum(exact)} of {len(exact)} calls exact, {cpu_ms:.0f} ms of CPU for each;")
    print(trajectory.endpoint_counts, last[-100:])
    assert played.reward == 1.0, last
    assert all(exact)
    assert len(backend.calls) == len(trajectory.turns) == case.calls
    assert len(trajectory.sequences) == case.sequences
    assert trajectory.endpoint_counts.continued_calls == case.calls - case.sequences
    assert trajectory.endpoint_counts.retokenization_mismatches == 0


# ---- ids on real engines

CONTEXT = 24576
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def long_toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The toy with room for what coding agents say first, and less eager to be silent."""
    safetensors = pytest.importorskip("safetensors.numpy", reason="no extra `torch`")
    folder = tmp_path_factory.mktemp("toy")
    for file in TOY.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = orjson.loads((TOY / "config.json").read_bytes())
    config["max_position_embeddings"] = CONTEXT
    (folder / "config.json").write_bytes(orjson.dumps(config))
    weights = safetensors.load_file(folder / "model.safetensors")
    weights["lm_head.weight"][list(TOYS.stop_token_ids)] = 0.0
    safetensors.save_file(weights, folder / "model.safetensors")
    return folder


@asynccontextmanager
async def engine(kind: str, model: Path, folder: Path) -> AsyncIterator[Server]:
    if kind == "vllm":
        length = {"max_model_len": str(CONTEXT), "max_num_batched_tokens": str(CONTEXT)}
        made = vllm(folder, model=model, **length)
    else:
        made = embedded(folder, model=model)
        made.argv += ["--max-model-len", str(CONTEXT), "--max-num-seqs", "4"]
    async with serving(made):
        yield made


async def fed_back(kind: str, url: str, model: Path, sequence: Sequence) -> np.ndarray:
    """Returns the engine's logprob of each id of a stored sequence but the first, given those
    before.
    """
    ids = sequence.token_ids_L
    if kind == "vllm":
        body = {"model": "toy", "prompt": ids.tolist(), "max_tokens": 1, "prompt_logprobs": 0}
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{url}/v1/completions", json=body | {"temperature": 1.0}) as answer,
        ):
            prompt_logprobs = (await answer.json())["choices"][0]["prompt_logprobs"]
        return np.array([prompt_logprobs[i][str(ids[i])]["logprob"] for i in range(1, len(ids))])
    torch = pytest.importorskip("torch", reason="the extra `torch` is not installed")
    from transformers import AutoModelForCausalLM

    weights: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        logits = weights(torch.from_numpy(ids).long()[None]).logits[0, :-1]
    sampled_logprobs = logits.log_softmax(-1).gather(1, torch.from_numpy(ids).long()[1:, None])[
        :, 0
    ]
    return np.asarray(sampled_logprobs.numpy())


@pytest.mark.parametrize(
    "kind",
    [
        "embedded",
        pytest.param(
            "vllm", marks=pytest.mark.skipif(not VLLM_PYTHON, reason="no PRORL_VLLM_PYTHON")
        ),
    ],
)
async def test_stored_ids_fed_back_to_the_engine_give_their_logprobs(
    kind: str, long_toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", LAYERS)
    async with engine(kind, long_toy, tmp_path) as server:
        backend = VllmBackend(server.url, TOYS.vocab_size)
        for name in ("mini-swe-agent", "codex", "pydantic-ai", "openai-agents"):
            case, env = CASES[name], get_env("swe")
            swe_task = task(case)
            agent = case.agent.replace("command: ", "command: env MORE=2 ", 1)
            program = program_of(agent)
            spec = program.sandbox(env, swe_task) if program else env.sandbox(swe_task, Stage.RUN)
            assert spec is not None
            async with isolated()(spec) as sandbox:
                await env.prepare(swe_task, sandbox)
                context = AttemptContext(
                    task=swe_task,
                    env=env,
                    messages=env.messages(swe_task),
                    tools=(),
                    renderer=TOYS,
                    backend=backend,
                    sandbox=sandbox,
                    deadline=Deadline(300.0),
                    key=AttemptKey("r", len(name), 1),
                    session=name,
                    sampling=SamplingParams(max_tokens=48),
                    limits=RolloutLimits(run_s=300.0, max_turns=6, max_tokens=CONTEXT),
                )
                trajectory = await get_agent(agent).run(context)
            assert trajectory.turns, trajectory.failure.message
            gap, tokens = 0.0, 0
            for sequence in trajectory.sequences:
                engine_logprobs = await fed_back(kind, server.url, long_toy, sequence)
                widths = np.diff([0, *sequence.span_end_S])
                sampled_L = np.repeat(sequence.span_kind_S, widths) != SpanKind.CONTEXT
                sampled_logprobs = engine_logprobs[np.flatnonzero(sampled_L) - 1]
                gap = max(
                    gap, float(np.abs(sampled_logprobs - sequence.logprobs_C).max(initial=0.0))
                )
                tokens += len(sampled_logprobs)
            calls = len(trajectory.turns)
            print(
                kind,
                name,
                calls,
                len(trajectory.sequences),
                tokens,
                gap,
                trajectory.endpoint_counts,
            )
            assert tokens > 0
            assert gap < TOLERANCE
        await backend.close()
