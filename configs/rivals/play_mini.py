"""mini-swe-agent's own batch runner, on shells of this host; its predictions go to the trainer."""

import json
import sys
import threading
import time

import chain
from minisweagent.run.benchmarks.swebench import app

job = chain.Job()
data, out = job.folder / "data", job.folder / "out"
data.mkdir(exist_ok=True)
rows = [
    {"instance_id": f"t{task}__{sample}", "problem_statement": chain.prompt(task)}
    for task in job.tasks
    for sample in range(job.n)
]
(data / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
config = job.folder / "mini.yaml"
config.write_text(
    json.dumps(
        {
            "agent": {
                "system_template": chain.SYSTEM,
                "instance_template": "{{task}} End with COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT.",
                "cost_limit": 0,
            },
            "environment": {"environment_class": "local"},
            "model": {
                "model_name": "openai/policy",
                "model_kwargs": {"api_base": f"{job.url}/v1"},
                "cost_tracking": "ignore_errors",
            },
        }
    )
)
ended = threading.Event()


def tell() -> None:
    """Hand each finished instance to the trainer, once; what failed by the runner's word is not."""
    done = {(task, sample) for line in job.delivered for task, sample, _ in line["rollouts"]}
    last = False
    while True:
        last = ended.is_set()
        try:
            found = json.loads((out / "preds.json").read_text())
        except (OSError, ValueError):  # not there yet, or half written
            found = {}
        for name, row in found.items():
            task, sample = map(int, name[1:].split("__"))
            if (task, sample) in done:
                continue
            told = json.loads((out / name / f"{name}.traj.json").read_text())
            done.add((task, sample))
            if told["info"]["exit_status"] == "Submitted":
                job.deliver((task, sample, chain.reward(task, row["model_patch"])))
        if last:
            return
        time.sleep(0.05)


teller = threading.Thread(target=tell)
teller.start()
argv = ["--subset", str(data), "--split", "train", "-o", str(out), "-w", str(job.in_flight)]
try:
    app([*argv, "-c", str(config)], standalone_mode=False)
finally:
    ended.set()
    teller.join()
sys.exit(0)
