"""An agent of one's own: it asks twice, and the second answer is the artifact.

prorl run ... --set run.agent=tests/agents/plain.py:Plain      # with service.load_code
"""

from __future__ import annotations

from prorl.agents.context import AttemptContext
from prorl.agents.ending import End, concluded
from prorl.agents.sampler import Sampler
from prorl.types import Message, StopReason, Trajectory

AGAIN = Message(role="user", content="Are you sure? Answer again.")


class Plain:
    """Implements `prorl.agents.context.Agent` with public names alone."""

    async def run(self, context: AttemptContext) -> Trajectory:
        renderer, sampler = context.renderer, Sampler(context)
        record, sequence = sampler.record, sampler.record.sequence

        async def drive() -> End:
            sequence.context(renderer.prompt(context.messages, context.tools), turn=0)
            said = await sampler.sample(sequence, turn=0)
            sequence.context(renderer.bridge(said.token_ids_C, [AGAIN]), turn=1)
            answer = renderer.parse((await sampler.sample(sequence, turn=1)).token_ids_C)
            record.messages += [renderer.parse(said.token_ids_C), AGAIN, answer]
            record.final = answer.content
            return End(StopReason.DONE)

        # whatever goes wrong is how it ended, and raises nothing
        return await concluded(context, record, drive())
