"""The env `repair`: a bug in one line of a module, for small policies with a real shell.

The workspace holds `data.source` as `data.file`. The policy looks with `bash`, edits with `files`
and ends; what it is shown is short. Hidden tests (`code.tests`, as HumanEval's: `prompt`, to which
the module is appended, `entry_point`, `test`) grade the file that it leaves, in a fresh sandbox.
`broken` and `mended`, the line as it is and as it should be, are for the oracle.
"""

from __future__ import annotations

import re
from dataclasses import replace

from prorl.envs.base import Solution
from prorl.envs.code import MAX_PROGRAM_BYTES, CodeEnv
from prorl.envs.settings import PromptSettings
from prorl.envs.tools import BASH, FILES, text_field
from prorl.errors import NotFoundError
from prorl.protocols import Sandbox
from prorl.types import Task, ToolCall, ToolResult

MAX_OUTPUT_CHARS = 120
_WHERE = re.compile(r" (?:in|of) /.*")


class RepairEnv(CodeEnv):
    name = "repair"
    settings = PromptSettings
    system = "Mend the module."
    works_in_sandbox = True
    offers = (BASH, FILES)

    def check(self, task: Task) -> None:
        for field in ("file", "source"):
            text_field(task, field)
        super().check(task)

    def system_message(self, task: Task) -> str:
        return self.system

    def question(self, task: Task) -> str:
        return task.prompt

    async def prepare(self, task: Task, sandbox: Sandbox | None) -> None:
        if sandbox is not None:
            await sandbox.put(task.data["file"], task.data["source"].encode())

    async def call(
        self, task: Task, sandbox: Sandbox | None, call: ToolCall, timeout_s: float
    ) -> ToolResult:
        """Run a tool; its output's beginning, without where the workspace is."""
        result = await super().call(task, sandbox, call, timeout_s)
        return replace(result, output=_WHERE.sub("", result.output).strip()[:MAX_OUTPUT_CHARS])

    async def artifact(self, task: Task, final: str, sandbox: Sandbox | None) -> bytes:
        """The module as it was left; nothing where it is gone."""
        if sandbox is None:
            return b""
        try:
            return await sandbox.get(task.data["file"], MAX_PROGRAM_BYTES)
        except (NotFoundError, OSError):
            return b""

    def reference(self, task: Task) -> Solution:
        return Solution(
            (
                ToolCall("bash", {"command": f"grep {task.data['form']} {task.data['file']}"}),
                edit(task, task.data["broken"], task.data["mended"]),
            ),
            "Done.",
        )


def edit(task: Task, old: str, new: str) -> ToolCall:
    """The call that replaces a text of the module."""
    where = {"command": "str_replace", "path": task.data["file"]}
    return ToolCall("files", {**where, "old_str": old, "new_str": new})
