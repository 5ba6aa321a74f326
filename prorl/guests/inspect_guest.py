"""A sample of a task of Inspect (https://inspect.aisi.org.uk) as a guest: its solver, its scorer.

data: task (`file.py@name` or a registered name), args, sample (its id), scorer (whose value is the
reward; the first).
"""

import json
import os

from inspect_ai import eval
from inspect_ai.scorer import value_to_float

with open(os.environ["PRORL_TASK"]) as file:
    data = json.load(file)["data"]
(log,) = eval(
    data["task"],
    task_args=data.get("args", {}),
    sample_id=data.get("sample"),
    limit=None if "sample" in data else 1,
    model="openai/policy",
    model_args={"responses_api": False},
    display="none",
    max_connections=64,
    log_dir="logs",
)
if log.status != "success" or not log.samples or log.samples[0].error:
    raise SystemExit(f"the task failed: {log.error or log.samples}")
scores = {name: value_to_float()(score.value) for name, score in log.samples[0].scores.items()}
with open("reward.json", "w") as file:
    json.dump({**scores, "reward": scores[data.get("scorer", next(iter(scores)))]}, file)
