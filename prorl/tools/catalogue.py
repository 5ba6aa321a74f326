"""The tools that every sandbox can serve: one row and one file each.

A row says where the tool's class is and how the policy sees the tool. Envs offer it by its row
(`prorl.envs.tools`), the tool server makes it of the same row, the zygote imports it before it
forks. The class is made with a `Place` (`server/place.py`) and has `run(arguments, until)`, which

- gives {"output": Capped, "exit_code": int, "timed_out": bool} (`server/files.py` is an example);
- ends by `until` (`time.monotonic`) by itself, since the server has one thread: what computes, or
  evaluates what the agent wrote, runs in a child (`server/python.py`);
- answers a mistake of the agent with exit code 1 or 2: OSError, ValueError, KeyError and TypeError
  become 2, any other exception ends the tool server.

Part of the tool server's zipapp, so: Python 3.8, and nothing imported.
"""

from __future__ import annotations

TYPE_CHECKING = False  # as in `typing`, whose import is dear (`server/light.py`)
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any


class Tool:
    """One row: where a tool's class is, and what a policy is told of it."""

    __slots__ = ("attribute", "description", "module", "parameters")

    def __init__(
        self, module: str, attribute: str, description: str, parameters: Mapping[str, Any]
    ) -> None:
        self.module, self.attribute = module, attribute
        self.description, self.parameters = description, parameters

    def load(self) -> Any:
        # not importlib, whose own import is dearer than all of a small server's
        return getattr(__import__(self.module, fromlist=[self.attribute]), self.attribute)


def _object(required: list[str], **properties: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required}


def _interpreter(module: str, attribute: str, description: str) -> Tool:
    """A tool that runs code, of which it shows what is printed and the last expression's value."""
    code = {"type": "string", "description": "What to run."}
    return Tool(
        f"prorl.tools.server.{module}", attribute, description, _object(["code"], code=code)
    )


CATALOGUE = {
    "bash": Tool(
        "prorl.tools.server.bash",
        "Bash",
        "Run a command in a persistent bash shell in your workspace. Gives its output and exit"
        " status.",
        _object(["command"], command={"type": "string", "description": "What to run."}),
    ),
    "python": _interpreter(
        "python",
        "Python",
        "Run Python code in a persistent interpreter. Gives what it prints and the value of its"
        " last expression.",
    ),
    "files": Tool(
        "prorl.tools.server.files",
        "Files",
        "View and edit files in your workspace.",
        _object(
            ["command", "path"],
            command={"type": "string", "enum": ["view", "create", "str_replace", "insert"]},
            path={"type": "string"},
            file_text={"type": "string", "description": "create: the whole content."},
            old_str={
                "type": "string",
                "description": "str_replace: what to replace; must occur exactly once.",
            },
            new_str={"type": "string", "description": "str_replace, insert: what to write."},
            insert_line={
                "type": "integer",
                "description": "insert: after this line; 0 is the start.",
            },
            view_range={
                "type": "array",
                "items": {"type": "integer"},
                "description": "view: first and last line.",
            },
        ),
    ),
    "ipython": _interpreter(
        "ipython",
        "IPython",
        "Run a cell in a persistent IPython shell, magics included. Gives what it prints and the"
        " value of its last expression; images are kept as files.",
    ),
    "jupyter": _interpreter(
        "jupyter",
        "Jupyter",
        "Run a cell in a persistent Jupyter kernel. Gives what it prints and the value of its last"
        " expression; images are kept as files.",
    ),
}
