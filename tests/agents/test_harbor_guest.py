"""Trials of the real Harbor as guests, in an environment of this host: `make test-adapters`."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from prorl.envs import get_env
from prorl.errors import RolloutError
from prorl.testing import Replies, Reply, make_task, play
from prorl.types import FAILURE_CLASS, FailureCode, Json, Message, RolloutLimits, ToolCall
from tests.agents.test_guest_packages import VENVS
from tests.harbor_folders import make_folder

BIN = VENVS / "harbor" / "bin"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not BIN.exists(), reason=f"no environment of harbor at {VENVS}"),
    pytest.mark.skipif(not shutil.which("unshare"), reason="no unshare"),
]
HERE = r"""
import asyncio, os, shutil, sys
from pathlib import Path
from harbor.agents.installed.mini_swe_agent import MiniSweAgent
from harbor.environments.base import BaseEnvironment, ExecResult
from harbor.environments.capabilities import EnvironmentCapabilities

SHARED = ["/usr", "/bin", "/lib", "/lib64", "/sbin", "/etc", "/dev", "/proc"]
SHARED += [sys.prefix, os.path.realpath(sys.prefix), sys.base_prefix]
SHARED = dict.fromkeys([*SHARED, *os.environ.get("SHARED", "").split()])
ENTER = os.environ.get("ENTER", "").split()
FOLDERS = ["app", "tmp", "root", "tests", "solution"]
FOLDERS += ["logs/agent", "logs/verifier", "logs/artifacts"]

class Here(BaseEnvironment):
    # this host, or the one that ENTER leads to, with folders of its own for what a task writes

    @staticmethod
    def type():
        return "here"

    @property
    def capabilities(self):
        return EnvironmentCapabilities()

    def _validate_definition(self):
        pass

    async def start(self, force_build):
        self.root = Path("root").absolute() / self.session_id
        for name in FOLDERS:
            (self.root / name).mkdir(parents=True, exist_ok=True)
        lines = []
        for path in SHARED:
            (self.root / path[1:]).parent.mkdir(parents=True, exist_ok=True)
            if os.path.islink(path):
                (self.root / path[1:]).symlink_to(os.readlink(path))
            else:
                (self.root / path[1:]).mkdir(parents=True, exist_ok=True)
                lines.append(f"mount --rbind {path} {self.root}{path}")
        self.mounts = "\n".join(lines)

    async def stop(self, delete):
        shutil.rmtree(self.root)

    async def exec(self, command, cwd=None, env=None, timeout_sec=None, user=None):
        path = f"{sys.prefix}/bin:/usr/sbin:/usr/bin:/bin"
        variables = {"PATH": path, "HOME": "/root", **(self._merge_env(env) or {})}
        enter = f'exec chroot {self.root} env -C {cwd or "/app"} bash -c "$1"'
        shell = ["bash", "-c", f"set -e; {self.mounts}\n{enter}", "-", command]
        process = await asyncio.create_subprocess_exec(
            *(*ENTER, "unshare", "-Urm", *shell),
            env=variables,
            stdin=-3,
            stdout=-1,
            stderr=-1,
        )
        out, err = await asyncio.wait_for(process.communicate(), timeout_sec)
        return ExecResult(
            stdout=out.decode(), stderr=err.decode(), return_code=process.returncode
        )

    async def upload_file(self, source_path, target_path):
        target = self.root / str(target_path)[1:]
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source_path, target)

    async def upload_dir(self, source_dir, target_dir):
        shutil.copytree(source_dir, self.root / str(target_dir)[1:], dirs_exist_ok=True)

    async def download_file(self, source_path, target_path):
        shutil.copy(self.root / source_path[1:], target_path)

    async def download_dir(self, source_dir, target_dir):
        shutil.copytree(self.root / source_dir[1:], target_dir, dirs_exist_ok=True)


class Installed(MiniSweAgent):
    async def install(self, environment):
        pass
"""
"""An environment as Harbor's users write them, and an agent that is installed already."""

SUBMIT = ToolCall("bash", {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"})


def bash(command: str) -> Reply:
    return Message(
        role="assistant", content="", tool_calls=(ToolCall("bash", {"command": command}),)
    )


def keys(keystrokes: str) -> Reply:
    command = {"keystrokes": keystrokes, "duration": 1.0}
    done = {"analysis": "", "plan": "", "commands": [command] if keystrokes else []}
    return json.dumps({**done, "task_complete": not keystrokes})


def writes(agent: str, text: str) -> list[Reply]:
    """Returns the policy's replies that write a text into sum.txt, and end."""
    if agent == "oracle":
        return []
    command = f"echo {text} > sum.txt"
    if agent == "terminus-2":
        return [keys(f"{command}\n"), keys(""), keys("")]
    return [bash(command), Message(role="assistant", content="", tool_calls=(SUBMIT,))]


AGENTS: dict[str, Json] = {
    "oracle": {"name": "oracle"},
    "terminus-2": {"name": "terminus-2", "kwargs": {"record_terminal_session": False}},
    "mini-swe-agent": {"import_path": "here:Installed"},
}
TOML = "[agent]\ntimeout_sec = 120\n[verifier]\ntimeout_sec = 60\n[environment]\n"
LIMITS = RolloutLimits(run_s=300.0, max_turns=20, max_tokens=1 << 20)
BROKEN = "#!/bin/bash\nexit 1\n"


def rows(folder: Path, agent: Json, **more: str) -> Json:
    (folder / "here.py").write_text(HERE)
    variables = {"PATH": f"{BIN}:{os.environ['PATH']}", "PYTHONPATH": str(folder), **more}
    variables["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
    argv = ["env", *(f"{name}={text}" for name, text in variables.items())]
    return {
        "argv": [*argv, str(BIN / "python"), "{guests}/harbor_guest.py"],
        "task": {"path": str(folder / "task")},
        "agent": agent,
        "environment": {"import_path": "here:Here"},
    }


@pytest.mark.parametrize("name", AGENTS)
async def test_the_verifiers_reward_is_the_rollouts(name: str, tmp_path: Path) -> None:
    if name == "terminus-2" and not shutil.which("tmux"):
        pytest.skip("no tmux, which terminus-2 types into")
    for text, reward in (("5", 1.0), ("6", 0.0)):
        solution = f"#!/bin/bash\necho {text} > sum.txt\n"
        make_folder(tmp_path / "task", **{"task.toml": TOML, "solution/solve.sh": solution})
        policy = Replies(*writes(name, text))
        task = make_task("guest", "", **rows(tmp_path, AGENTS[name]))
        playing = play(get_env("guest"), task, policy, limits=LIMITS)
        if name == "oracle":  # the policy has not spoken, so there is nothing to train on
            with pytest.raises(RolloutError, match=f"left a reward of {reward:g}") as ended:
                await playing
            assert ended.value.code == FailureCode.BAD_TASK
            continue
        played = await playing
        assert played.reward == reward, played.trajectory.messages[-1].content
        sequences = played.trajectory.sequences
        assert [sequence.weight for sequence in sequences] == [1.0]
        for prompt, reply in zip(policy.prompts, policy.completions, strict=True):
            ids = [*prompt, *reply.token_ids_C]
            assert sequences[0].token_ids_L[: len(ids)].tolist() == ids
    make_folder(tmp_path / "task", **{"tests/test.sh": BROKEN})
    task = make_task("guest", "", **rows(tmp_path, AGENTS[name]))
    with pytest.raises(RolloutError) as caught:
        await play(get_env("guest"), task, Replies(*writes(name, "5")), limits=LIMITS)
    assert not FAILURE_CLASS[FailureCode(caught.value.code)].trains
