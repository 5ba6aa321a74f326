"""The program in which users' agents run; see `users.py`."""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from prorl import plugins
from prorl.agents import ENTRY_POINTS
from prorl.agents.attempt import Attempt, AttemptFacts, UserAgent
from prorl.errors import ConfigError, TaskError, placed
from prorl.helper.child import Answer, HelperChannel, place_of, serve
from prorl.helper.process import MOST_CALLS
from prorl.plugins import MEND_FILE
from prorl.sandbox_calls import SandboxProxy, asking


def prepare(channel: HelperChannel, name: str) -> Answer:
    """Import and make the agent. Raises ConfigError."""
    try:
        agent: UserAgent = plugins.make(ENTRY_POINTS, name, ConfigError, plugins.NO_PARTS)
    except ConfigError as error:
        place = place_of(error)
        raise ConfigError(placed(error.problem, place), error.expected, error.hint) from None
    if not callable(getattr(agent, "run", None)):
        arguments = f"agent {name!r} is a {type(agent).__name__} without `run`"
        raise ConfigError(arguments, "a class with `async def run(self, attempt)`", MEND_FILE)

    def answer(facts: AttemptFacts) -> str:
        ask = partial(asking, channel, channel.number)
        sandbox = None if facts.sandbox is None else SandboxProxy(facts.sandbox, channel)
        with asyncio.Runner() as runner:
            runner.get_loop().set_default_executor(ThreadPoolExecutor(MOST_CALLS))
            signal.signal(signal.SIGINT, signal.default_int_handler)  # RUN may end the rollout
            try:
                return runner.run(_driven(name, agent, Attempt(facts, ask, sandbox)))
            finally:
                signal.signal(signal.SIGINT, signal.SIG_IGN)

    return answer


async def _driven(name: str, agent: UserAgent, attempt: Attempt) -> str:
    await attempt.ask("begin")
    pid = os.getpid()
    try:
        running: Any = agent.run(attempt)
        text = await running if inspect.isawaitable(running) else running
    finally:
        if os.getpid() != pid:
            os._exit(1)  # a fork of the agent's, which would close the loop that it shares with us
    if text is None:
        text = attempt.last_reply.content if attempt.last_reply is not None else ""
    if not isinstance(text, str):
        arguments = f"agent {name!r} gave {text!r:.80}"
        raise TaskError(arguments, "the text of its answer, or None for the policy's last reply")
    return text


if __name__ == "__main__":
    serve(prepare, with_channel=True)
