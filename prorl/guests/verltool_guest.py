"""A tool server of VeRL-Tool (https://github.com/TIGER-AI-Lab/verl-tool) as a guest's world.

data: url (where its `python -m verl_tool.servers.serve` is), extra (its extra_fields), reward
(`module:attr`, called with the messages and data, as its reward managers judge), max_turns (20).
"""

import json
import os
import uuid
from importlib import import_module

import httpx
from openai import OpenAI

with open(os.environ["PRORL_TASK"]) as file:
    task = json.load(file)
data, client = task["data"], OpenAI(max_retries=0)
me, messages = uuid.uuid4().hex, [{"role": "user", "content": task["prompt"]}]


def observed(action, **extra):
    body = {"trajectory_ids": [me], "actions": [action], "extra_fields": [extra]}
    body["finish"] = [extra.get("finish", False)]
    answer = httpx.post(f"{data['url']}/get_observation", json=body, timeout=None)
    seen = answer.raise_for_status().json()
    return seen["observations"][0], seen["dones"][0], seen["valids"][0]


for _ in range(data.get("max_turns", 20)):
    reply = client.chat.completions.create(model="policy", messages=messages).choices[0].message
    messages.append({"role": "assistant", "content": reply.content})
    seen, done, valid = observed(reply.content or "", **data.get("extra", {}))
    if done or not valid:  # what calls no tool is the answer
        break
    text = seen["obs"] if isinstance(seen, dict) else seen
    messages.append({"role": "user", "content": text})
observed("", finish=True)
module, _, name = data["reward"].partition(":")
with open("reward.json", "w") as file:
    json.dump({"reward": float(getattr(import_module(module), name)(messages, data))}, file)
