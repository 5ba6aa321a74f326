"""GEM (https://github.com/axon-rl/gem) as a guest: `step` takes the policy's texts.

data: id (`gem.make`), arguments, seed.
"""

import json
import os

import gem
from openai import OpenAI

with open(os.environ["PRORL_TASK"]) as file:
    task = json.load(file)
data, client = task["data"], OpenAI(max_retries=0)
env = gem.make(data["id"], **data.get("arguments", {}))
seen, _ = env.reset(seed=data.get("seed", 0))
messages = [{"role": "user", "content": f"{task['prompt']}\n\n{seen}".strip()}]
total, over, steps = 0.0, False, 0
while not over:
    reply = client.chat.completions.create(model="policy", messages=messages).choices[0].message
    seen, reward, ended, cut, _ = env.step(reply.content or "")
    messages.append({"role": "assistant", "content": reply.content})
    messages.append({"role": "user", "content": seen})
    total, over, steps = total + float(reward), ended or cut, steps + 1
with open("reward.json", "w") as file:
    json.dump({"reward": total, "steps": steps}, file)
