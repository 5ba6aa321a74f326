"""Software-engineering tasks in SWE-bench's shape (Jimenez et al. 2024).

The policy changes a repository so that hidden tests pass.

| `task.data` | |
|---|---|
| FAIL_TO_PASS, PASS_TO_PASS | names of tests that must pass afterwards; lists, or their JSON text |
| test_patch | unified diff that brings the hidden tests; none: the image and `test_command` do |
| patch | the reference solution, for oracles and for `verify` |
| files, archive | the repository: path -> text; or a .tar[.gz] on the node |
| image | folder or .sif to run in; where it holds the repository, `setup` copies it |
| requirements, wheels | where there is no image: Python packages (`envs/base.py`), else pytest |
| setup | shell commands that make the workspace ready, as the agent's user; once a node |
| test_command | shell commands that run the tests; default: pytest on the files of `test_patch` |
| log_parser | how the log is read (`logs.py`); default: as `test_command` looks |
| environment | variables of setup, tests and the agent's bash: name -> text |
| timeout_s, setup_s | limits of tests (60), setup (600); below `limits.eval_s`, `limits.init_s` |
| verified | true: `verify` is left out, somebody has done it |
| tools, sandbox | further tools (`prorl/tools`); fields of SandboxSpec |

The repository lies in the workspace as one git commit without history, behind one tag that gives the
image's version; an image needs git and python3. What crosses into EVAL is the diff to that commit, which is brought behind the tests into a
workspace prepared afresh, without what decides about it (`guard.py`). The reward is 1 when all
named tests pass, else 0; a diff that does not apply, tests that hang or a sandbox that they break
are 0, too; a workspace whose changes cannot be read any more is `sandbox_broken`.

Who can forge a verdict: `change_grader.py`, and `docs/software-engineering.md` for what remains possible.
"""

from __future__ import annotations

from base64 import b64encode
from dataclasses import replace

from prorl.envs.base import BaseEnv, Solution
from prorl.envs.swe import fields, workspace
from prorl.envs.swe.change_grader import (
    NOTHING,
    ChangeGrader,
    bring_reference,
    bring_tests,
    check_reference,
    check_untouched,
    run_task,
    score_of,
)
from prorl.envs.swe.fields import check_fields
from prorl.envs.tools import BASH, FILES, text_field
from prorl.errors import NoReferenceError
from prorl.limits import Deadline
from prorl.protocols import Sandbox
from prorl.types import HOST_WHEELS, SandboxSpec, Score, Stage, Task, ToolCall, ToolResult

GOLD_PATCH = ".git/reference.patch"
PYTEST = ("pytest",)
"""The packages that tests find beside Python where a task names neither image nor requirements."""


class SweEnv(BaseEnv):
    name = "swe"
    offers = (BASH, FILES)
    works_in_sandbox = True
    scores_in_sandbox = True

    def check(self, task: Task) -> None:
        super().check(task)
        check_fields(task)

    def system_message(self, task: Task) -> str:
        names = {tool.name for tool in self.tools(task)} & {BASH.name, FILES.name}
        around = {
            frozenset({"bash", "files"}): "Look around with bash, edit with files or bash, run",
            frozenset({"bash"}): "Look around and edit with bash, run",
            frozenset({"files"}): "Look around and edit with files, try",
        }
        return (
            "You work on a repository, which is your workspace. Change it so that it does what the"
            f" user asks for; hidden tests decide. {around.get(frozenset(names), 'Run')} what helps"
            " you. Your changes in the workspace count as they are: when they are complete, say so"
            " in a sentence."
        )

    def sandbox(self, task: Task, stage: Stage) -> SandboxSpec | None:
        """Gives it packages of its own in every case: what this host has installed decides nothing."""
        spec = super().sandbox(task, stage)
        if spec is None or spec.image or spec.requirements:
            return spec
        return replace(spec, requirements=PYTEST, wheels=HOST_WHEELS)

    def preparation(self, task: Task) -> str:
        """Everything that `prepare` reads; empty where a copy would save nothing."""
        return workspace.preparation(task)

    async def prepare(self, task: Task, sandbox: Sandbox | None) -> None:
        assert sandbox is not None
        await workspace.prepare(task, sandbox)

    async def call(
        self, task: Task, sandbox: Sandbox | None, call: ToolCall, timeout_s: float
    ) -> ToolResult:
        exports = fields.exports(task)
        command = call.arguments.get("command") if call.name == BASH.name else None
        if exports and isinstance(command, str):
            call = call._replace(arguments={**call.arguments, "command": exports + command})
        return await super().call(task, sandbox, call, timeout_s)

    async def artifact(self, task: Task, final: str, sandbox: Sandbox | None) -> bytes:
        """The diff to the first commit. Raises SandboxError where the agent made it impossible."""
        assert sandbox is not None
        return await workspace.changes(task, sandbox)

    async def verify(self, task: Task, sandbox: Sandbox, deadline: Deadline) -> None:
        """Checks that the task's own lists hold here: in a prepared sandbox of its own, once a
        node.

        Raises RolloutError with BAD_TASK, GraderError, SandboxError.
        """
        if task.data.get("verified"):
            return
        await bring_tests(task, sandbox)
        check_untouched(task, await run_task(task, sandbox, deadline, is_ours=True))
        if fields.patch(task).strip():
            await bring_reference(task, sandbox)
            check_reference(task, await run_task(task, sandbox, deadline, is_ours=True))

    async def score(
        self, task: Task, artifact: bytes, sandbox: Sandbox | None, deadline: Deadline
    ) -> Score:
        assert sandbox is not None
        note, diff = workspace.remark(artifact)
        if not diff.strip():
            return score_of(task, NOTHING, f"{note}no change")
        return await ChangeGrader(task, sandbox, deadline, artifact).score()

    def reference(self, task: Task) -> Solution:
        self.check(task)
        if "patch" not in task.data:
            raise NoReferenceError(f"task {task.task_id!r}: no patch", "the reference's diff")
        names = {tool.name for tool in self.tools(task)}
        if BASH.name not in names:
            raise NoReferenceError(f"task {task.task_id!r}: `tools` leaves bash out", "bash")
        patch = text_field(task, "patch")
        command = f"git apply --whitespace=nowarn {GOLD_PATCH} && git status --short"
        if FILES.name in names:
            arguments = {"command": "create", "path": GOLD_PATCH, "file_text": patch}
            calls = [ToolCall("files", arguments), ToolCall("bash", {"command": command})]
        else:
            write = f"base64 -d >{GOLD_PATCH} <<'END'\n{b64encode(patch.encode()).decode()}\nEND\n"
            calls = [ToolCall("bash", {"command": write + command})]
        return Solution(tuple(calls), "The change is in the workspace.")
