"""An agent of Agent Lightning 0.3 (https://github.com/microsoft/agent-lightning) as a guest.

data: agent (`module:attr`, a LitAgent or a function under `@rollout`, which returns its reward),
input (its task; else the prompt), resource (the name of its LLM: main_llm).
"""

import asyncio
import json
import os
import time
from importlib import import_module

from agentlightning.types import LLM, Rollout

with open(os.environ["PRORL_TASK"]) as file:
    task = json.load(file)
data, (module, _, name) = task["data"], task["data"]["agent"].partition(":")
agent = getattr(import_module(module), name)
theirs = data.get("input", task["prompt"])
llm = LLM(
    endpoint=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"], model="policy"
)
arguments = {
    "resources": {data.get("resource", "main_llm"): llm},
    "rollout": Rollout(rollout_id=task["task_id"], input=theirs, start_time=time.time()),
}
if agent.is_async():
    reward = asyncio.run(agent.training_rollout_async(theirs, **arguments))
else:
    reward = agent.training_rollout(theirs, **arguments)
if not isinstance(reward, int | float):
    raise SystemExit(f"the agent returned {reward!r}, no reward")
with open("reward.json", "w") as file:
    json.dump({"reward": float(reward)}, file)
