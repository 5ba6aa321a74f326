"""An app of LangGraph (https://langchain-ai.github.io/langgraph) as a guest.

data: app (`module:attr`, a compiled graph or what makes one), reward (`module:attr`, called with
the state that it ends in and data), input (instead of the prompt as a user's message).
"""

import json
import os
from importlib import import_module


def named(reference):
    module, _, attribute = reference.partition(":")
    return getattr(import_module(module), attribute)


with open(os.environ["PRORL_TASK"]) as file:
    task = json.load(file)
data, app = task["data"], named(task["data"]["app"])
graph = app if hasattr(app, "invoke") else app()
state = graph.invoke(data.get("input", {"messages": [("user", task["prompt"])]}))
with open("reward.json", "w") as file:
    json.dump({"reward": float(named(data["reward"])(state, data))}, file)
