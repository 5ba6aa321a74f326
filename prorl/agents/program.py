"""A program as the agent: it runs in the sandbox, unmodified, and asks the policy by HTTP.

    RUN                                the sandbox, without network
    ---                                ----------------------------
    listener <------- passed out ----- 127.0.0.1:8000
    endpoint serves it <------------------ POST /v1/chat/completions and other dialects
    exec ----------------------------> mini-swe-agent, codex ... in the workspace

Who connects runs in the sandbox, so the connection is the identity: no key names another rollout.
The program's end is the rollout's, as are its time limit and its exit status; artifact and score
are the env's. What it does between two calls is not journalled: a worker that dies takes the
attempt with it.
"""

from __future__ import annotations

import asyncio
import re
import shlex
import signal
import socket
from asyncio import FIRST_COMPLETED
from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from typing import Any, TypeVar

from prorl.agents.capture.model_endpoint import ModelEndpoint
from prorl.agents.context import AttemptContext
from prorl.agents.ending import End, end_with, run_to_trajectory
from prorl.agents.programs import COMMAND, MODEL, Program
from prorl.agents.record import AttemptRecord
from prorl.agents.sampler import Sampler, within
from prorl.errors import BudgetError, RolloutError
from prorl.protocols import SupportsListen
from prorl.types import FailureCode, Json, Message, StopReason, ToolResult, Trajectory
from prorl.waits import wait_limit_s

ResultT = TypeVar("ResultT")

CALL_S = wait_limit_s("agent.call")
CANCEL_S = wait_limit_s("agent.cancel")
MOST_S = 7 * 86400.0
"""The tool server's limit: the attempt's own comes first, and may stand still meanwhile."""
OUTPUT_CHARS = 8000
"""The limit of its output, of which the end is kept."""
NO_CALL = "the program made no model call"
PRINTED_CHARS = 500
"""The limit of that in a failure's message."""
NOT_FOUND = 127
"""The exit status of a shell that does not find a program."""
KILLED = 128 + signal.SIGKILL
"""The exit status of a program that was killed, by a host short of memory or by a person."""
MAX_WORD_BYTES = 120_000
"""The limit of a word or a variable: Linux refuses a program with one of 131,072 (MAX_ARG_STRLEN),
its name and NUL included, as `Argument list too long`.
"""
MAX_INPUT_BYTES = 3 << 20
"""The limit of what a program is given at its start: a frame to the tool server holds 4 MiB with
its argv.
"""
PROMPT_FILE, SYSTEM_FILE, INPUT_FILE = ".prorl/prompt", ".prorl/system", ".prorl/input"
"""In a program's home."""
HOME = """\
if [ "$PWD" = /workspace ]; then HOME=/tmp/home; mkdir -p "$HOME"; else HOME=$(mktemp -d); fi
export HOME
"""
"""A home beside the workspace, whose changes count; where /tmp is the host's, one of its own."""


class ProgramAgent:
    def __init__(self, name: str, program: Program) -> None:
        self._name = program.argv[0] if name.startswith(COMMAND) else name
        self._program = program

    async def run(self, context: AttemptContext) -> Trajectory:
        sampler = Sampler(context)
        return await run_to_trajectory(context, sampler.record, self._drive(context, sampler))

    async def _drive(self, context: AttemptContext, sampler: Sampler) -> End:
        sandbox = context.sandbox
        if not isinstance(sandbox, SupportsListen):
            raise RolloutError(FailureCode.STAGE_ERROR, f"{self._name} has no sandbox that listens")
        endpoint = ModelEndpoint(context, sampler)
        async with served(context, endpoint, await sandbox.listen()) as base_url:
            argv, stdin = command(self._program, context, base_url)
            work = sandbox.exec(argv, MOST_S, stdin)
            try:
                done = await until_over(context, endpoint, work, self._name)
            except BudgetError as error:
                if endpoint.has_calls or endpoint.ended.done():
                    raise
                text = f"{NO_CALL} ({without_call(endpoint)}): {error.message}"
                return end_with(FailureCode.BAD_TASK, text)
        return self._end(sampler.record, endpoint, done)

    def _end(self, record: AttemptRecord, endpoint: ModelEndpoint, done: ToolResult) -> End:
        """Returns the end of an attempt whose program has ended.

        The policy answers for nothing before it has spoken. A program that asks it nothing, or
        nothing that its endpoint takes, would do so again: its user mends it. One that ends while
        its first call is under way may have been kept waiting by us, and one that was killed may
        have been about to call: they are tried again.
        """
        how = f"ended with exit status {done.exit_code} after {done.duration_s:.1f} s"
        text = f"{done.output[-OUTPUT_CHARS:].rstrip()}\n[{self._name} {how}]".lstrip()
        record.messages.append(Message(role="tool", name=self._name, content=text))
        if record.turns:
            return End(StopReason.DONE)
        printed = f": {output}" if (output := _last_lines(done.output)) else ""
        if endpoint.has_calls or done.exit_code == KILLED:
            text = f"the program {how}, before the reply to its first call{printed}"
            return end_with(FailureCode.STAGE_ERROR, text)
        if done.exit_code == NOT_FOUND and (missing := _missing(done.output)):
            text = f"the sandbox has no program {missing!r}; {self._program.remedy()}"
            return end_with(FailureCode.BAD_TASK, text)
        text = f"{NO_CALL} ({without_call(endpoint)}): it {how}{printed}"
        return end_with(FailureCode.BAD_TASK, text)


def without_call(endpoint: ModelEndpoint) -> str:
    """Returns why a program that ran made no model call, as far as its endpoint knows."""
    if endpoint.refusal:
        return f"the endpoint refused its requests, the last one with {endpoint.refusal}"
    return "its endpoint received no request that asks the policy"


def _last_lines(output: str) -> str:
    """Returns the end of an output: whole lines, unless the last one is too long."""
    text = output.strip()
    start = text.find("\n", -PRINTED_CHARS) + 1 if len(text) > PRINTED_CHARS else 0
    return text[start:] if start else text[-PRINTED_CHARS:]


@asynccontextmanager
async def served(
    context: AttemptContext, endpoint: ModelEndpoint, listener: socket.socket | None
) -> AsyncIterator[str]:
    """Serve the model endpoint on a listener until the block ends; where that is, for clients
    beside it.

    None: others let the model endpoint's clients in. Raises RolloutError for an attempt that
    another worker began: its program died with that.
    """
    with listener or nullcontext():
        if context.journal.resumes:
            raise RolloutError(FailureCode.WORKER_LOST, "its program died with its worker")
        async with AsyncExitStack() as stack:
            stack.push_async_callback(endpoint.close)
            if listener is None:
                yield ""
                return
            await stack.enter_async_context(endpoint.listening(listener))
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"


async def until_over(
    context: AttemptContext,
    endpoint: ModelEndpoint,
    work: Coroutine[Json, Json, ResultT],
    label: str,
) -> ResultT:
    """Awaits `work` within the attempt's time.

    Raises RolloutError as soon as the model endpoint says that nothing more can be sampled: a
    budget, a lost backend.
    """
    task = asyncio.ensure_future(work)
    ends: set[asyncio.Future[Any]] = {task, endpoint.ended}
    try:
        await within(context.deadline, asyncio.wait(ends, return_when=FIRST_COMPLETED), label)
    except BudgetError:
        # a call that is under way knows whose time it was
        await asyncio.wait({endpoint.ended}, timeout=CALL_S)
        if not endpoint.ended.done():
            raise
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task}, timeout=CANCEL_S)
    if endpoint.ended.done():
        raise endpoint.ended.result()
    return task.result()


def command(program: Program, context: AttemptContext, base_url: str) -> tuple[list[str], bytes]:
    """Returns the command that starts a program in a sandbox: argv, and the stdin that carries the
    files of its home.

    The prompt is a file, since Linux takes no word or variable of 128 KiB and programs read a word
    that begins with a dash as an option. Raises RolloutError for a prompt that `{prompt}` cannot
    hold.
    """
    env, (system, prompt) = environment(context, base_url, "prorl"), conversation(context)
    values = {
        "prompt": prompt,
        "prompt_yaml": _yaml_text(prompt),
        "system": system,
        "base_url": env["OPENAI_BASE_URL"],
        "model": MODEL,
        "context": str(context.limits.max_tokens),
    }

    def filled(text: str) -> str:
        return re.sub(r"\{(\w+)\}", lambda match: values.get(match[1], match[0]), text)

    words = [word.replace("{prompt_file}", "{home}/" + PROMPT_FILE) for word in program.argv]
    for word in words:
        for name in ("prompt", "system"):
            if f"{{{name}}}" in word and not _fits(values[name]):
                raise RolloutError(
                    FailureCode.BAD_TASK,
                    f"a {name} of {len(values[name]):,} letters, for a command with `{{{name}}}`;"
                    f" expected at most {MAX_WORD_BYTES:,} bytes and no NUL; have it read the file"
                    f" $PRORL_{name.upper()}_FILE",
                )
    files = {PROMPT_FILE: prompt, SYSTEM_FILE: system}
    files |= {path: filled(text) for path, text in program.files.items()}
    script, stdin = [HOME], bytearray()
    for path in files:
        script.append(f'mkdir -p "$HOME"/{shlex.quote(path.rpartition("/")[0])}\n')
    script.append(f'cat > "$HOME"/{INPUT_FILE}\n')
    for path, text in files.items():
        content = text.encode(errors="replace")
        part = f'tail -c +{len(stdin) + 1} "$HOME"/{INPUT_FILE} | head -c {len(content)}'
        script.append(f'{part} > "$HOME"/{shlex.quote(path)}\n')
        stdin += content
    if len(stdin) > MAX_INPUT_BYTES:
        problem = f"{len(stdin):,} bytes of prompt and system prompt, for a program"
        raise RolloutError(FailureCode.BAD_TASK, f"{problem}; expected at most {MAX_INPUT_BYTES:,}")
    script.append(f'rm "$HOME"/{INPUT_FILE}\n')
    script.append(f'export PRORL_PROMPT_FILE="$HOME"/{PROMPT_FILE}\n')
    script.append(f'export PRORL_SYSTEM_FILE="$HOME"/{SYSTEM_FILE}\n')
    source = '"$PRORL_PROMPT_FILE"' if program.reads_stdin else "/dev/null"
    placed = " ".join(map(_placed, range(1, len(words) + 1), words))
    script.append(f"exec {placed} < {source}")
    env |= {name: filled(text) for name, text in program.env.items()}
    exports = (f"{name}={text}" for name, text in env.items())
    return ["env", *exports, "bash", "-c", "".join(script), "-", *map(filled, words)], bytes(stdin)


def _missing(output: str) -> str:
    """Returns the program that bash should have become, by its last line; empty if there was one.

    >>> _missing("bash: line 1: exec: codex: not found\\n"), _missing("exec: a: not found\\nb")
    ('codex', '')
    """
    line = output.rstrip().rpartition("\n")[2]
    _, mark, name = line.removesuffix(": not found").rpartition("exec: ")
    return name if mark and line.endswith(": not found") else ""


def _placed(place: int, word: str) -> str:
    """A word of the program in the script that starts it, which alone knows its home."""
    if "{home}" in word:
        return '"$HOME"'.join(map(shlex.quote, word.split("{home}")))
    return f'"${{{place}}}"'


def _fits(text: str) -> bool:
    return len(text.encode(errors="replace")) <= MAX_WORD_BYTES and "\0" not in text


def _yaml_text(text: str) -> str:
    """A text as YAML's double quotes hold it, whatever its characters."""
    return f'"{re.sub(_NOT_PLAIN, lambda match: f"{chr(92)}U{ord(match[0]):08X}", text)}"'


_NOT_PLAIN = re.compile(r"""[^ !#-\[\]-~]""")
"""A quote, a backslash, and all that is no printable character of ASCII."""


def conversation(context: AttemptContext) -> tuple[str, str]:
    """System prompt and prompt: what the env's messages say."""
    system = [message for message in context.messages if message.role == "system"]
    prompt = [message for message in context.messages if message.role != "system"]
    system_text, prompt_text = (
        "\n\n".join(message.content for message in part) for part in (system, prompt)
    )
    return system_text, prompt_text


def environment(context: AttemptContext, base_url: str, key: str) -> dict[str, str]:
    """Returns the variables that tell programs of every kind where the policy is and what their
    task is, where a variable can hold it.
    """
    system, prompt = conversation(context)
    texts = {"PRORL_PROMPT": prompt, "PRORL_SYSTEM": system}
    return {
        "OPENAI_BASE_URL": f"{base_url}/v1",
        "OPENAI_API_KEY": key,
        "OPENAI_MODEL": MODEL,
        "ANTHROPIC_BASE_URL": base_url,
        "ANTHROPIC_API_KEY": key,
        "ANTHROPIC_MODEL": MODEL,
        "GOOGLE_GEMINI_BASE_URL": base_url,
        "GEMINI_API_KEY": key,
        "GEMINI_MODEL": MODEL,
        "NO_PROXY": "127.0.0.1",
        **{name: text for name, text in texts.items() if _fits(text)},
    }
