"""A trial of Harbor 0.26 (https://github.com/harbor-framework/harbor) as a guest.

Agent, environment and verifier are Harbor's; the policy is the agent's model. data: task, agent,
environment, verifier, as the fields of these names in Harbor's `TrialConfig`. `agent.model_name`
says by its provider which API the agent speaks: openai/policy (the default), anthropic/policy or
gemini/policy. Where the sandbox is on another host, `address` is that of the policy from there.
"""

import asyncio
import json
import os
from urllib.parse import urlsplit

from harbor.models.trial.config import TrialConfig
from harbor.trial.trial import Trial

ADDRESSES = ("OPENAI_BASE_URL", "ANTHROPIC_BASE_URL", "GOOGLE_GEMINI_BASE_URL")

with open(os.environ["PRORL_TASK"]) as file:
    data = json.load(file)["data"]
if "address" in data:
    for name in ADDRESSES:
        os.environ[name] = data["address"].rstrip("/") + urlsplit(os.environ[name]).path
os.environ["OPENAI_API_BASE"] = os.environ["OPENAI_BASE_URL"]
parts = {name: data[name] for name in ("environment", "verifier") if name in data}
agent = {"model_name": "openai/policy", **data.get("agent", {})}
config = TrialConfig(task=data["task"], agent=agent, trials_dir="trials", **parts)


async def play():
    return await (await Trial.create(config)).run()


result = asyncio.run(play())
rewards = result.verifier_result and result.verifier_result.rewards
if not rewards or "reward" not in rewards:
    raise SystemExit(f"no reward of the verifier: {rewards}, {result.exception_info}")
with open("reward.json", "w") as file:
    json.dump(rewards, file)
