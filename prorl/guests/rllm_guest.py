"""A flow of rLLM 0.3 (https://github.com/rllm-org/rllm), and its evaluator, as a guest.

data: flow, evaluator (`module:attr`, under `@rllm.rollout` and `@rllm.evaluator`), metadata.
"""

import asyncio
import json
import os
from importlib import import_module

from rllm.types import AgentConfig, Task, run_agent_flow

with open(os.environ["PRORL_TASK"]) as file:
    task = json.load(file)


def named(reference):
    module, _, attribute = reference.partition(":")
    return getattr(import_module(module), attribute)


data = task["data"]
theirs = Task(id=task["task_id"], instruction=task["prompt"], metadata=data.get("metadata", {}))
# its flows make clients with the key "EMPTY": who asks stands in the address
where = os.environ["OPENAI_BASE_URL"].removesuffix("/v1") + f"/{os.environ['OPENAI_API_KEY']}/v1"
config = AgentConfig(base_url=where, model="policy", session_uid=task["task_id"])
episode = asyncio.run(run_agent_flow(named(data["flow"]), theirs, config))
outcome = named(data["evaluator"]).evaluate(theirs, episode)
with open("reward.json", "w") as file:
    parts = {signal.name: float(signal.value) for signal in outcome.signals}
    json.dump({**parts, "reward": float(outcome.reward)}, file)
