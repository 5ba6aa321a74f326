"""An agent loop over OpenEnv's client: one session a rollout, the model by OpenAI's SDK."""

import asyncio
import json

import chain
from openai import AsyncOpenAI
from openenv.core.generic_client import GenericEnvClient


async def main() -> None:
    job = chain.Job()
    model = AsyncOpenAI(base_url=f"{job.url}/v1")

    async def one(task: int) -> float:
        async with GenericEnvClient(base_url=f"ws://127.0.0.1:{job.port}") as env:
            seen = await env.reset(number=task)
            messages = [
                {"role": "system", "content": chain.SYSTEM},
                {"role": "user", "content": seen.observation["text"]},
            ]
            while True:
                said = await model.chat.completions.create(
                    model="policy", messages=messages, tools=chain.TOOLS
                )
                message = said.choices[0].message
                messages.append(message.model_dump(exclude_none=True))
                if not message.tool_calls:
                    ended = await env.step({"answer": message.content})
                    return float(ended.reward)
                for call in message.tool_calls:
                    seen = await env.step(json.loads(call.function.arguments))
                    text = seen.observation["text"]
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": text})

    await chain.play(job, one)


asyncio.run(main())
