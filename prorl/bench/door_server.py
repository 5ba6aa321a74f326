"""The doors that `prorl bench door` knocks at: `python -m prorl.bench.door_server ROLLOUTS CALLS`.

Says where they are, and after each line of input the CPU seconds of this process so far. The policy
says the same each time and costs nothing, so that what is left is the door's: HTTP, the dialect,
placing, bridging, recording.
"""

from __future__ import annotations

import asyncio
import json
import resource
import sys

from prorl.agents.context import AttemptContext
from prorl.agents.sampler import Sampler
from prorl.capture.door import Door
from prorl.envs import get_env
from prorl.limits import Deadline
from prorl.testing import RENDERER, Replies, make_task, sampled
from prorl.types import AttemptKey, Message, RolloutLimits, SamplingParams, ToolCall

SAID = Message(
    role="assistant", content="I look.", tool_calls=(ToolCall("bash", {"command": "ls -la src"}),)
)


def _context(number: int, calls: int) -> AttemptContext:
    reply = sampled(RENDERER.completion(SAID))
    return AttemptContext(
        task=make_task("math", "?", answer="24"),
        env=get_env("math"),
        messages=(),
        tools=(),
        renderer=RENDERER,
        backend=Replies(*[reply] * calls),
        sandbox=None,
        deadline=Deadline(3600.0),
        key=AttemptKey("bench", number, 1),
        session=str(number),
        limits=RolloutLimits(max_tokens=1 << 20, max_turns=calls + 1),
        sampling=SamplingParams(max_tokens=4096),
    )


async def main(rollouts: int, calls: int) -> None:
    """Open the doors, say where, count until the input ends."""
    loop, urls = asyncio.get_running_loop(), list[str]()
    contexts = [_context(number, calls) for number in range(rollouts)]
    doors = [Door(context, Sampler(context)) for context in contexts]
    for door in doors:
        server = await loop.create_server(door.protocol, "127.0.0.1", 0)
        urls.append(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    print("ready", json.dumps({"urls": urls}), flush=True)
    while await asyncio.to_thread(sys.stdin.readline):
        spent = resource.getrusage(resource.RUSAGE_SELF)
        bridged = sum(door.counts["bridged"] for door in doors)
        said = {"cpu_s": spent.ru_utime + spent.ru_stime, "bridged": bridged}
        print(json.dumps(said), flush=True)


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), int(sys.argv[2])))
