"""A pretrained model learns on a real vLLM: held-out reward before and after, for several seeds.

    python -m configs.smollm2.learn VLLM_PYTHON MODEL OUT [--seeds 0 1 2] [--steps 24] [--cuda]

VLLM_PYTHON is an interpreter with vLLM, MODEL the directory that `configs.smollm2.convert` wrote;
`make test-vllm` makes both. The tasks are those of `questions.py`; DAPO keeps groups that differ;
the trainer is the one of this package, in float32 beside the server on the same cores. Each seed
starts from the same weights with a service and a vLLM of its own, and appends a JSON row to
OUT/learn.jsonl: rewards of 96 held-out answers at temperature 1 and of 96
greedy ones, before and after, each with its 95 % Wilson interval; the reward of each step; seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from configs.smollm2.questions import tasks
from prorl.analysis.difference import wilson
from prorl.client import Client, connect
from prorl.storage.read.catalog import StoredRun
from prorl.types import SamplingParams

ENV = f"{Path(__file__).with_name('questions.py')}:Questions"
HELDOUT, HELDOUT_SEED, SAMPLES = 96, 7, 1
GROUPS, N, MAX_TOKENS = 4, 4, 8
SLOTS = 8
"""Two cores read the prompts of so many rollouts in a few seconds; a GPU takes hundreds."""
START_S = 600.0
"""The longest start of a vLLM: it imports for half a minute on a busy CPU."""
LIMITS = {"max_turns": 1, "max_tokens": 256, "run_s": 600}
ON_CPU = {
    "--kv-cache-memory-bytes": "512M",
    "--block-size": "32",
    "--distributed-executor-backend": "uni",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("vllm_python")
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--learning-rate", type=float, default=2e-5)
    parser.add_argument("--cuda", action="store_true", help="server and trainer on a GPU")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for seed in options.seeds:
        row = learn(options, seed)
        with (options.out / "learn.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(json.dumps(row), flush=True)


def learn(options: argparse.Namespace, seed: int) -> dict[str, object]:
    began, folder = time.monotonic(), options.out / f"seed-{seed}"
    if folder.exists():
        raise SystemExit(f"{folder} exists; expected a new folder: name another OUT")
    folder.mkdir()
    note(f"seed {seed}: vLLM starts")
    questions = tasks(ENV, 1000 + seed, 400, tasks(ENV, HELDOUT_SEED, HELDOUT))
    with vllm(options, folder) as url, serve(folder, options.model, url) as client:
        before = evaluate(client, folder, "before")
        note(f"before: sampled {before['sampled'][0]:.2f}, greedy {before['greedy'][0]:.2f}")
        client.create_run(
            run_id="train",
            filter="dapo",
            delivery="stream",
            seed=seed,
            sampling={"max_tokens": MAX_TOKENS},
            limits=LIMITS,
            epochs=100,
            groups_per_step=GROUPS,
            max_open_groups=3 * GROUPS,
            max_uncommitted_groups=10 * GROUPS,
            max_staleness=2,
        )
        client.submit("train", questions, N, key="tasks", last=True)
        training = time.monotonic()
        steps = train(options, folder, seed)
        trained_s = time.monotonic() - training
        client.cancel("train")
        after = evaluate(client, folder, "after")
    return {
        "seed": seed,
        "device": "cuda" if options.cuda else f"cpu, {len(os.sched_getaffinity(0))} cores",
        "before": before,
        "after": after,
        "step_rewards": [round(step["reward"], 3) for step in steps],
        "version": steps[-1]["version"],
        "training_s": round(trained_s),
        "seconds": round(time.monotonic() - began),
    }


@contextlib.contextmanager
def vllm(options: argparse.Namespace, folder: Path) -> Iterator[str]:
    """A vLLM in a session of its own, since its engine would outlive it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    flags = {
        "--model": options.model,
        "--port": port,
        "--host": "127.0.0.1",
        "--dtype": "float32",
        "--max-model-len": 256,
        "--served-model-name": "smollm2",
        "--generation-config": "vllm",
        "--logprobs-mode": "processed_logprobs",
        "--uvicorn-log-level": "warning",
        **({} if options.cuda else ON_CPU),
    }
    words = [str(word) for pair in flags.items() for word in pair]
    words += ["--enforce-eager", "--enable-prompt-tokens-details", "--no-enable-chunked-prefill"]
    environment = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    if not options.cuda:
        environment |= {"TORCH_COMPILE_DISABLE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        environment |= {"OMP_NUM_THREADS": "1"}  # it binds threads to cores that others use
    argv = [options.vllm_python, "-m", "vllm.entrypoints.openai.api_server", *words]
    with (folder / "vllm.log").open("wb") as log:
        server = subprocess.Popen(
            argv, stdout=log, stderr=log, env=os.environ | environment, start_new_session=True
        )
    url, until = f"http://127.0.0.1:{port}", time.monotonic() + START_S
    try:
        while True:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{url}/health", timeout=5).close()
                break
            if server.poll() is not None or time.monotonic() > until:
                raise SystemExit(f"vLLM did not start: {folder / 'vllm.log'}")
            time.sleep(1.0)
        yield url
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


@contextlib.contextmanager
def serve(folder: Path, model: Path, url: str) -> Iterator[Client]:
    argv = [sys.executable, "-m", "prorl.cli", "serve", "--root", str(folder), "--policy", url]
    argv += ["--set", "service.load_code=true", "--set", f"service.tokenizer={model}"]
    argv += ["--set", f"service.run.slots={SLOTS}"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            if not process.stdout.readline().startswith("serving"):
                raise SystemExit("the service did not start")
            with connect(folder) as client:
                yield client
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(60)


def evaluate(client: Client, folder: Path, name: str) -> dict[str, list[float]]:
    """Reward with its interval, and rollouts: [mean, low, high, count]."""
    heldout, rewards = tasks(ENV, HELDOUT_SEED, HELDOUT), {}
    for mode, temperature, n in (("sampled", 1.0, SAMPLES), ("greedy", 0.0, 1)):
        sampling = SamplingParams(max_tokens=MAX_TOKENS, temperature=temperature)
        run = f"{name}-{mode}"
        client.evaluate(run, heldout, n, sampling=sampling, limits=LIMITS)
        rows = StoredRun(folder / run).sql(
            "select avg(reward) r, count(*) n from rollouts where valid"
        )
        mean, count = rows.column("r")[0].as_py(), rows.column("n")[0].as_py()
        rewards[mode] = [round(figure, 3) for figure in (mean, *wilson(mean, count))] + [count]
    return rewards


def train(options: argparse.Namespace, folder: Path, seed: int) -> list[dict[str, float]]:
    """Play the trainer to its end; returns the figures of its steps."""
    config = {
        "service": str(folder),
        "run": "train",
        "model": str(options.model),
        "output": str(folder / "training"),
        "steps": options.steps,
        "groups_per_step": GROUPS,
        "learning_rate": options.learning_rate,
        "warmup_steps": 3,
        "tokens_per_pass": 1024,
        "checkpoint_steps": 5,
        "keep_checkpoints": 2,
        "seed": seed,
        "threads": 2,
        "device": "cuda" if options.cuda else "cpu",
    }
    file = folder / "trainer.json"
    file.write_text(json.dumps(config))
    argv, steps = [sys.executable, "-m", "prorl.trainer", "--config", str(file)], []
    with (
        (folder / "trainer.log").open("w") as log,
        subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=log, text=True) as trainer,
    ):
        assert trainer.stdout is not None
        for line in trainer.stdout:
            if line.startswith("step "):
                steps.append(json.loads(line.removeprefix("step ")))
                note(f"step {len(steps)}/{options.steps}: reward {steps[-1]['reward']:.2f}")
    if trainer.returncode or not steps:
        raise SystemExit(f"the trainer ended with {trainer.returncode}: {folder / 'trainer.log'}")
    return steps


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
