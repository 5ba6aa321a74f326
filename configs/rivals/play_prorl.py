"""prorl's trainer, beside a `prorl serve`: submits, and streams whole groups behind its cursor."""

import sys
import time
from pathlib import Path

import prorl
from prorl.errors import ConfigError, UnavailableError
from prorl.types import Task

sys.path.insert(0, str(Path(__file__).parent))
import chain

job = chain.Job()
while True:
    try:
        client = prorl.connect(job.folder / "root")
        client.status()
        break
    except (UnavailableError, ConfigError):
        time.sleep(0.1)
env = f"{Path(__file__).parent / 'env.py'}:Chain"
client.create_run(
    run_id="run", delivery="stream", max_open_groups=1024, max_uncommitted_groups=1024
)
tasks = [
    Task(task_id=str(number), env=env, prompt=chain.prompt(number), data={"number": number})
    for number in job.tasks
]
groups = client.submit("run", tasks, n=job.n, key="all", last=True)
number_of = {group["group_id"]: number for group, number in zip(groups, job.tasks, strict=True)}
cursor = job.delivered[-1]["cursor"] if job.delivered else None
for batch in client.stream("run", cursor=cursor, groups_per_batch=1):
    job.deliver(
        *(
            (number_of[group], rollout, reward)
            for group, rollout, reward in zip(
                batch.group_ids.tolist(),
                batch.rollout_ids.tolist(),
                batch.rewards.tolist(),
                strict=True,
            )
        ),
        cursor=batch.cursor,
    )
    client.commit(batch)
