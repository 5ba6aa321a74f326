"""An agent loop of the OpenAI SDK that stays warm: it leases attempts and plays many at once.

    PRORL_TOKEN=... python openai_guest.py http://HOST:PORT NAME [SLOTS]

data: messages and functions (as Chat Completions has them), prices (of the tool `price`), answer:
the tasks of `prorl demo --agent openai`. `python` computes here, so it takes arithmetic alone.
"""

import ast
import asyncio
import json
import os
import sys

from openai import APIConnectionError, APIError, AsyncOpenAI

url, name, slots = sys.argv[1], sys.argv[2], int((sys.argv[3:] or ["64"])[0])
token = os.environ["PRORL_TOKEN"]
SUMS = (ast.Expression, ast.BinOp, ast.UnaryOp, ast.Constant, ast.operator, ast.unaryop)


def ran(data, tool, arguments):
    try:
        parameters = json.loads(arguments)
        if tool == "price":
            return str(data["prices"].get(parameters["item"], "error: not sold"))
        tree = ast.parse(parameters["code"], mode="eval")
        if any(not isinstance(node, SUMS) or isinstance(node, ast.Pow) for node in ast.walk(tree)):
            return "error: NameError"
        return str(eval(compile(tree, "", "eval"), {"__builtins__": {}}))[:40]
    except (ValueError, KeyError, TypeError, SyntaxError, ArithmeticError, RecursionError) as error:
        return f"error: {type(error).__name__}"


async def play(client, lease):
    data, messages = lease["task"]["data"], list(lease["task"]["data"]["messages"])
    mine = client.with_options(base_url=lease["base_url"], api_key=lease["key"])
    try:
        while messages[-1]["role"] != "assistant":
            answer = await mine.chat.completions.create(
                model="policy", messages=messages, tools=data["functions"]
            )
            message = answer.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            for call in message.tool_calls or ():
                seen = ran(data, call.function.name, call.function.arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": seen})
        reward = float(messages[-1].get("content") == data["answer"])
        await mine.post(
            f"/guests/leases/{lease['lease']}/done", cast_to=object, body={"reward": reward}
        )
    except APIError as error:  # its turns are over, and that is known there
        print(f"{lease['rollout']}: {error}", flush=True)


async def main():
    client, playing = AsyncOpenAI(base_url=f"{url}/v1", api_key=token, max_retries=0), set()
    async with asyncio.TaskGroup() as group:
        while True:
            while len(playing) >= slots:
                await asyncio.wait(playing, return_when=asyncio.FIRST_COMPLETED)
            request = {"slots": slots - len(playing), "wait_s": 30}
            try:
                leases = await client.post(f"/guests/{name}/lease", cast_to=object, body=request)
            except APIConnectionError as error:
                print(f"lease: {error}", flush=True)
                leases = await asyncio.sleep(1, [])
            for lease in leases:
                playing.add(task := group.create_task(play(client, lease)))
                task.add_done_callback(playing.discard)


asyncio.run(main())
