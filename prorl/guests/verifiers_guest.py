"""A taskset of verifiers 0.4 (https://github.com/PrimeIntellect-ai/verifiers) as a guest.

data: taskset, config, index (0), harness ("null": the conversation and the taskset's tools). Its
tools, users and reward functions are the taskset's own; the harness runs beside it, as a process.
"""

import asyncio
import json
import os
from itertools import islice

from verifiers.v1 import AgentConfig, EvalClientConfig, make_agent
from verifiers.v1.runtimes.subprocess import SubprocessConfig
from verifiers.v1.utils.loaders import load_taskset, taskset_config_type

with open(os.environ["PRORL_TASK"]) as file:
    data = json.load(file)["data"]
config = taskset_config_type(data["taskset"])(id=data["taskset"], **data.get("config", {}))
theirs = next(islice(iter(load_taskset(config)), data.get("index", 0), None))
agent = make_agent(
    AgentConfig(
        model="policy",
        harness={"id": data.get("harness", "null")},
        runtime=SubprocessConfig(),
        client=EvalClientConfig(
            base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY"
        ),
    )
)
trace = asyncio.run(agent.run(theirs))
if not trace.ok or None in trace.rewards.values():
    raise SystemExit(f"the taskset failed: {trace.errors}")
with open("reward.json", "w") as file:
    parts = {name: float(reward.score) for name, reward in trace.rewards.items()}
    json.dump({**parts, **trace.metrics, "reward": float(trace.reward)}, file)
