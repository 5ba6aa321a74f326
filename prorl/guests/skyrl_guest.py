"""SkyRL-gym (https://github.com/NovaSky-AI/SkyRL) as a guest: `step` takes the policy's texts.

data: id (`skyrl_gym.make`), config, extras (as its data sets have them: reward_spec ...).
"""

import json
import os

import skyrl_gym
from openai import OpenAI

with open(os.environ["PRORL_TASK"]) as file:
    task = json.load(file)
data, client = task["data"], OpenAI(max_retries=0)
env = skyrl_gym.make(data["id"], env_config=data.get("config", {}), extras=data.get("extras", {}))
messages, _ = env.init([{"role": "user", "content": task["prompt"]}])
total, done, steps = 0.0, False, 0
while not done:
    reply = client.chat.completions.create(model="policy", messages=messages).choices[0].message
    stepped = env.step(reply.content or "")
    messages = [
        *messages,
        {"role": "assistant", "content": reply.content},
        *stepped["observations"],
    ]
    total, done, steps = total + float(stepped["reward"]), stepped["done"], steps + 1
env.close()
with open("reward.json", "w") as file:
    json.dump({"reward": total, "steps": steps}, file)
