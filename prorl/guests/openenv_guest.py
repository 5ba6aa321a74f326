"""An env of OpenEnv 0.10 (https://github.com/huggingface/OpenEnv) as a guest.

data: url of its server, or app (`module:app`, started here); field of the action that takes an
answer (without: the answer's last line is the action as JSON); reset, max_steps (50).
"""

import json
import os
import socket
import subprocess
import sys
import time

from openai import OpenAI
from openenv.core import GenericEnvClient

with open(os.environ["PRORL_TASK"]) as file:
    task = json.load(file)
data, client, url = task["data"], OpenAI(max_retries=0), task["data"].get("url")
if url is None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = [sys.executable, "-m", "uvicorn", data["app"], "--port", str(port)]
    server = subprocess.Popen(words)
    url = f"http://127.0.0.1:{port}"
    while socket.socket().connect_ex(("127.0.0.1", port)):  # its time limit bounds it
        if server.poll() is not None:
            raise SystemExit(f"the server of {data['app']} ended")
        time.sleep(0.1)
total, steps, messages = 0.0, 0, []
with GenericEnvClient(base_url=url).sync() as env:
    seen = env.reset(**data.get("reset", {}))
    user_text = f"{task['prompt']}\n\n{json.dumps(seen.observation)}".strip()
    while not seen.done and steps < data.get("max_steps", 50):
        messages.append({"role": "user", "content": user_text})
        reply = client.chat.completions.create(model="policy", messages=messages).choices[0].message
        messages.append({"role": "assistant", "content": reply.content})
        steps += 1
        try:
            last = (reply.content or "").split("\n")[-1]
            action = {data["field"]: reply.content} if "field" in data else json.loads(last)
        except ValueError:
            user_text = "That is no action: end with one as a JSON object."
            continue
        seen = env.step(action)
        total, user_text = total + float(seen.reward or 0.0), json.dumps(seen.observation)
with open("reward.json", "w") as file:
    json.dump({"reward": total, "steps": steps}, file)
