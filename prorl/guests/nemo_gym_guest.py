"""A resources server of NeMo Gym 0.4 (https://github.com/NVIDIA-NeMo/Gym) as a guest's world.

data: url of one that runs, or server (`module:Class` of one, served here), row: a line of its data
set, with responses_create_params. Its tools are called as its simple_agent calls them.
"""

import json
import os
from importlib import import_module

import httpx
from openai import OpenAI

with open(os.environ["PRORL_TASK"]) as file:
    data = json.load(file)["data"]
if "url" in data:
    http = httpx.Client(base_url=data["url"], timeout=None)
else:
    from nemo_gym.server_utils import ServerClient
    from starlette.testclient import TestClient

    kind = getattr(import_module(data["server"].partition(":")[0]), data["server"].split(":")[1])
    config = kind.model_fields["config"].annotation(host="", port=0, entrypoint="", name="it")
    served = kind(config=config, server_client=ServerClient.model_construct())
    http = TestClient(served.setup_webserver())
row, client, output = data["row"], OpenAI(max_retries=0), []
params = {"tools": [], **row["responses_create_params"]}
conversation = params.pop("input")
conversation = (
    [{"role": "user", "content": conversation}] if isinstance(conversation, str) else conversation
)
http.post("/seed_session", json=row).raise_for_status()
while not output or output[-1]["type"] == "function_call_output":
    reply = client.responses.create(
        model="policy", input=conversation + output, tools=params["tools"]
    )
    output += [item.model_dump(mode="json", exclude_none=True) for item in reply.output]
    for call in [item for item in reply.output if item.type == "function_call"]:
        answer = http.post(f"/{call.name}", json=json.loads(call.arguments)).text
        tool_output = {"type": "function_call_output", "call_id": call.call_id, "output": answer}
        output.append(tool_output)
response = reply.model_dump(mode="json") | {"output": output}
verdict = http.post("/verify", json=row | {"response": response}).raise_for_status().json()
with open("reward.json", "w") as file:
    numbers = {name: number for name, number in verdict.items() if isinstance(number, int | float)}
    json.dump({**numbers, "reward": float(verdict["reward"])}, file)
