"""A trainer beside verifiers' env server, as prime-rl drives it: so many runs at a time."""

import asyncio

import chain
from verifiers.v1 import EvalClientConfig
from verifiers.v1.serve.client import EnvClient
from verifiers.v1.types import SamplingConfig
from verifiers_chain import Data


async def main() -> None:
    job = chain.Job()
    server = EnvClient(f"tcp://127.0.0.1:{job.port}")
    await server.wait_for_server_startup()
    model = EvalClientConfig(base_url=f"{job.url}/v1", api_key_var="OPENAI_API_KEY")

    async def one(task: int) -> float:
        data = Data(prompt=chain.prompt(task), system_prompt=chain.SYSTEM, number=task)
        episode = await server.run(model, "policy", SamplingConfig(), data.model_dump(mode="json"))
        trace = episode.traces[0]
        if trace.errors or trace.reward is None:
            raise RuntimeError(str(trace.errors))
        return float(trace.reward)

    await chain.play(job, one)
    await server.close()


asyncio.run(main())
