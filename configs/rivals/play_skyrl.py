"""SkyRL 0.4's own generator and inference client over SkyRL-gym, a group at a time.

That is what its fully asynchronous trainer does: so many groups are generated at once, each by a
call of `generate`.
"""

# ruff: noqa: E402
import asyncio
import json
import re
import typing

import typing_extensions

typing.TypedDict = typing_extensions.TypedDict  # it wants Python 3.12 for this alone

import chain
import skyrl_gym
from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import (
    RemoteInferenceClient,
)
from skyrl.train.config import GeneratorConfig, SkyRLGymConfig
from skyrl.train.generators.skyrl_gym_generator import SkyRLGymGenerator
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput
from transformers import AutoTokenizer


class Shell(BaseTextEnv):
    def __init__(self, env_config=None, extras=None) -> None:
        super().__init__()
        self._number = extras["number"]

    def step(self, action: str) -> BaseTextEnvStepOutput:
        called = re.search(r"<tool_call>\s*(\{.*\})\s*</tool_call>", action, re.DOTALL)
        if called is None:
            said = action.replace("<|im_end|>", "")
            return BaseTextEnvStepOutput(
                observations=[], reward=chain.reward(self._number, said), done=True, metadata={}
            )
        output = chain.shell(json.loads(called[1])["arguments"]["command"])
        text = f"<tool_response>\n{output}\n</tool_response>"
        seen = [{"role": "user", "content": text}]
        return BaseTextEnvStepOutput(observations=seen, reward=0.0, done=False, metadata={})


async def main() -> None:
    job = chain.Job()
    skyrl_gym.register(id="chain", entry_point=Shell)
    tokenizer = AutoTokenizer.from_pretrained(job.tokenizer)
    config = GeneratorConfig(max_turns=8, batched=False, max_input_length=4096)
    client = RemoteInferenceClient(
        proxy_url=job.url,
        server_urls=[job.url],
        data_parallel_size=1,
        model_name="policy",
        tokenizer=tokenizer,
    )
    gym = SkyRLGymConfig(max_env_workers=job.in_flight)
    generator = SkyRLGymGenerator(config, gym, client, tokenizer)

    async def group(task: int, samples: int) -> list[float]:
        messages = [
            {"role": "system", "content": chain.SYSTEM},
            {"role": "user", "content": chain.prompt(task)},
        ]
        made = await generator.generate(
            {
                "prompts": [messages] * samples,
                "env_classes": ["chain"] * samples,
                "env_extras": [{"number": task} for _ in range(samples)],
                "sampling_params": {"max_tokens": 256, "temperature": 1.0, "logprobs": 0},
            },
            disable_tqdm=True,
        )
        return [float(sum(one) if isinstance(one, list) else one) for one in made["rewards"]]

    await chain.play_groups(job, group)


asyncio.run(main())
