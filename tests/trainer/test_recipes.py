"""configs/recipes: what ships is accepted by what reads it, and runs ten steps at toy size."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import orjson
import pytest

from prorl.cli.commands.run import run
from prorl.config import parse
from prorl.config.file import load_file
from prorl.tasks import load_tasks
from prorl.trainer.config import TrainerConfig
from prorl.types import Task
from tests.envs.test_all_envs import TASKS
from tests.trainer.tiny_model import save_model
from tests.trainer.toy_service import PYTHON

RECIPES = Path(__file__).parents[2] / "configs" / "recipes"
DOMAINS = ("math", "code", "stem", "swe")
STEPS, GROUPS = 10, 1


def rows(path: Path, domain: str, count: int = 60) -> Path:
    """Tasks of a domain as a file."""
    tasks: tuple[Task, ...] = TASKS[domain]
    values = [
        {
            "task_id": f"{domain}/{i}",
            "env": task.env,
            "prompt": task.prompt,
            "data": dict(task.data),
        }
        for i in range(count)
        for task in [tasks[i % len(tasks)]]
    ]
    path.write_bytes(b"\n".join(map(orjson.dumps, values)))
    assert len(load_tasks(path)) == count
    return path


@pytest.mark.parametrize("domain", DOMAINS)
def test_a_dry_run_looks_at_all_of_it_and_starts_nothing(
    domain: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tasks = f"tasks={rows(tmp_path / f'{domain}.jsonl', domain)}"
    exit_code = run(
        config=RECIPES / f"{domain}.yaml",
        set_=[tasks, "policy=flaky"],
        root=str(tmp_path / "root"),
        dry_run=True,
    )
    output = capsys.readouterr().out
    assert exit_code == 0
    assert not (tmp_path / "root").exists()
    assert "60 tasks, 480 rollouts" in output
    assert "dapo" in output


def test_the_shipped_trainers_file_is_read() -> None:
    config = parse(TrainerConfig, load_file(RECIPES / "trainer.yaml"), "trainer.yaml")
    assert (config.groups_per_step, config.minibatches, config.kl) == (32, 4, 1e-4)


def verl_overrides() -> list[str]:
    text = (RECIPES / "verl.sh").read_text().replace("\\\n", " ")
    (line,) = re.findall(r"verl\.trainer\.main_ppo (.*)", text)
    return [word for word in shlex.split(line) if word != "$@"]


@pytest.mark.skipif(find_spec("verl") is None, reason="verl is not installed: make test-adapters")
def test_verl_knows_every_override() -> None:
    from hydra import compose, initialize_config_dir

    spec = find_spec("verl")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    folder = str(Path(spec.submodule_search_locations[0]) / "trainer" / "config")
    with initialize_config_dir(config_dir=folder, version_base=None):
        config = compose("ppo_trainer", overrides=verl_overrides())
    assert config.actor_rollout_ref.actor.kl_loss_coef == 1e-4
    assert config.algorithm.rollout_correction.bypass_mode


def toy(tmp_path: Path) -> Path:
    """A tiny model with a tokenizer that TRL can open."""
    model = save_model(tmp_path / "model", vocab_size=512, max_tokens=8192)
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "model": {
            "type": "WordLevel",
            "vocab": {f"t{i}": i for i in range(512)},
            "unk_token": "t0",
        },
    }
    (model / "tokenizer.json").write_bytes(orjson.dumps(tokenizer))
    (model / "tokenizer_config.json").write_bytes(
        orjson.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "eos_token": "t1",
                "pad_token": "t0",
                "unk_token": "t0",
            }
        )
    )
    return model


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("domain", DOMAINS)
def test_ten_steps_at_toy_size(domain: str, tmp_path: Path) -> None:
    """The trainer is TRL with its adapter where TRL is there, else the shipped trainer."""
    root, tasks = tmp_path / "root", rows(tmp_path / f"{domain}.jsonl", domain, 24)
    sets = ["run.limits.max_tokens=4096", "run.sampling.max_tokens=2048"]
    sets.append("run.max_staleness=-1")  # a script takes no weights, so its tokens grow old

    service = [str(PYTHON), "-m", "prorl.cli", "run", "-c", str(RECIPES / f"{domain}.yaml")]
    service += ["--tasks", str(tasks), "--policy", "flaky", "--name", domain, "--root", str(root)]
    service += [word for setting in sets for word in ("--set", setting)]
    model, out = toy(tmp_path), tmp_path / "out"
    with subprocess.Popen(service, stderr=subprocess.PIPE, text=True) as process:
        try:
            while not (root / domain / "manifest.json").exists():
                assert process.poll() is None, process.stderr and process.stderr.read()
                signal.sigtimedwait([], 0.2)
            done = subprocess.run(
                trainer(model, root, domain, out),
                env={**os.environ, "PYTHONPATH": str(RECIPES.parents[1])},
                capture_output=True,
                text=True,
                timeout=500,
                check=False,
            )
            assert done.returncode == 0, done.stderr[-3000:]
        finally:
            process.send_signal(signal.SIGINT)
            process.communicate()
    steps = {path.name for path in out.glob("**/checkpoint-*")} | {
        path.name for path in out.glob("checkpoints/*")
    }
    assert any(name.endswith(str(STEPS)) for name in steps), steps


def trainer(model: Path, root: Path, domain: str, out: Path) -> list[str]:
    if find_spec("trl") is not None:
        module = "prorl.trainer.adapters.train_trl"
        script = [sys.executable, "-m", module, str(model), str(root), domain, str(out)]
        return [*script, "--cpu", "--steps", str(STEPS), "--groups", str(GROUPS)]
    values = load_file(RECIPES / "trainer.yaml")
    values |= {"service": str(root), "run": domain, "model": str(model), "output": str(out)}
    values |= {"steps": STEPS, "groups_per_step": GROUPS, "device": "cpu", "publish": False}
    values |= {"tokens_per_pass": 4096, "minibatches": 1, "dtype": "float32"}
    out.mkdir()
    (out / "trainer.json").write_bytes(orjson.dumps(values))
    return [sys.executable, "-m", "prorl.trainer", "--config", str(out / "trainer.json")]
