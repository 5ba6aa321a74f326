"""Gymnasium (https://gymnasium.farama.org) as a guest: an answer is an action, the return a reward.

data: id (`gymnasium.make`), arguments, seed, max_steps (50), target (1): the return worth 1.
"""

import json
import os

import gymnasium
from openai import OpenAI

with open(os.environ["PRORL_TASK"]) as file:
    task = json.load(file)
data, client = task["data"], OpenAI(max_retries=0)
env = gymnasium.make(data["id"], **data.get("arguments", {}))
seen, _ = env.reset(seed=data.get("seed", 0))
instruction = f"Each answer ends in a line with one action as JSON, of {env.action_space}."
user_text, total, over, steps, messages = (
    f"{task['prompt']}\n{instruction}\nYou see: {seen}",
    0.0,
    False,
    0,
    [],
)
while not over and steps < data.get("max_steps", 50):
    messages.append({"role": "user", "content": user_text})
    reply = client.chat.completions.create(model="policy", messages=messages).choices[0].message
    messages.append({"role": "assistant", "content": reply.content})
    steps += 1
    try:
        action = env.action_space.from_jsonable([json.loads(reply.content.split("\n")[-1])])[0]
        if not env.action_space.contains(action):
            raise ValueError(action)
    except (ValueError, TypeError, AttributeError):
        user_text = f"That is no action. {instruction}"
        continue
    seen, reward, ended, cut, _ = env.step(action)
    total, over = total + float(reward), ended or cut
    user_text = f"You see: {seen}\nreward {reward:g}"
with open("reward.json", "w") as file:
    worth = min(1.0, max(0.0, total / data.get("target", 1.0)))
    json.dump({"reward": worth, "return": total, "steps": steps}, file)
