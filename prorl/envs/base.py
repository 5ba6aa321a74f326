"""`BaseEnv`: an env with sound defaults, of which a domain says only what is its own.

    class Capitals(BaseEnv):
        name = "capitals"
        system = "Answer with the name of a city."
        needs = ("answer",)
        rubric = Rubric((exact, 1.0))

        @tool("Look up a word in the atlas.", word={"type": "string"})
        def look_up(self, task: Task, word: str) -> str: ...

What a domain gives: its tools, `offers` for those that run inside the sandbox and methods marked
with `tool` for those that run on the host, and its score, a `rubric`. All else may stay as it is;
each method of `prorl.protocols.Env` may be replaced. A method `respond` gives the env turns of its
own (`prorl.protocols.Responds`). docs/extending.md has a whole one.

| `task.data` | read by every env that derives from this one |
|---|---|
| settings | what `settings` declares: tools, system message ... (`prorl/envs/settings.py`) |
| tools | names of further tools (`prorl/tools`) |
| image | a name (`prorl image ls`), or the absolute path of a folder or .sif |
| requirements | Python packages, installed once a node; the host's own are hidden then |
| wheels | where they come from: a folder of wheels, an index's URL, `host` |
| sandbox | resources: the other fields of `SandboxSpec` |
| network | what it may reach, for each phase (`prorl/network_policy.py`) |
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, ClassVar

from prorl.env_settings import KEY
from prorl.env_state import state_argument
from prorl.envs.settings import EnvSettings, PromptSettings, record_of
from prorl.envs.tools import (
    BAD_CALL,
    Solution,
    call_problem,
    field_error,
    make_spec,
    run_call,
    spec_by_name,
    task_tools,
    text_field,
)
from prorl.errors import ConfigError, NoReferenceError, RolloutError, TaskError, boundary
from prorl.limits import MAX_ARTIFACT_BYTES, Deadline
from prorl.network_policy import PHASES, network_of
from prorl.rubric import Rubric
from prorl.states import FailureCode
from prorl.types import (
    HOST_WHEELS,
    Json,
    Message,
    SandboxSpec,
    Score,
    Stage,
    Task,
    ToolCall,
    ToolResult,
    ToolSpec,
)

if TYPE_CHECKING:
    from prorl.protocols import Env, Reference, Sandbox

__all__ = ["BaseEnv", "Solution", "tool"]

_COMMENT = re.compile(r"(?:^|\s)#.*$")


class BaseEnv:
    """Implements `prorl.protocols.Env`. Stateless, as every env."""

    name: str = ""
    """The name by which tasks call it."""
    settings: ClassVar[type[EnvSettings]] = PromptSettings
    """The record of the settings that a run or a row may give (`prorl/envs/settings.py`)."""
    system: str = ""
    """The system message where no setting has another; empty: none."""
    needs: tuple[str, ...] = ()
    """Fields of `task.data` that are texts and must be there."""
    offers: tuple[ToolSpec, ...] = ()
    """Tools inside the RUN sandbox: BASH, PYTHON ... of `prorl.envs.tools`, `served("ipython")`, or
    your own by `user_spec("name")`.
    """
    rubric: Rubric = Rubric()
    """The rubric, which says what the artifact is worth."""
    works_in_sandbox: bool = False
    """True if what is scored lies in the RUN sandbox, so that a setting must leave a tool in it."""
    scores_in_sandbox: bool = False
    """True if EVAL starts a sandbox for the rubric."""
    partial_credit: bool = False
    """True if a useless answer may score more than the worst (`prorl check` refuses that else)."""
    reward_range: tuple[float, float] = (0.0, 1.0)
    """The worst and the best reward: what `prorl check` expects of a useless answer and of the
    reference solution. A best of infinity stands for an open scale: a reference then only has to
    score more than the worst.
    """
    repeatable: tuple[str, ...] = ()
    """Methods marked with `tool` that change nothing: they may run again when a worker died."""
    own_tools: ClassVar[Mapping[str, ToolSpec]] = {}
    """The specs of the methods marked with `tool`, by name."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        marked = {name: getattr(value, "tool_spec", None) for name, value in vars(cls).items()}
        cls.own_tools = {**cls.own_tools, **{name: spec for name, spec in marked.items() if spec}}

    def check(self, task: Task) -> None:
        """Settings, `needs`, tools and resources are as they should be; nothing is run. Raises
        TaskError.
        """
        record_of(self).of(task)
        for field in self.needs:
            text_field(task, field)
        if not isinstance(task.data.get("image", ""), str):
            raise TaskError(
                f"task {task.task_id!r}: data.image is {task.data['image']!r}",
                "a name (`prorl image ls`) or an absolute path",
            )
        self.tools(task)
        self.sandbox(task, Stage.RUN)
        for stage in PHASES:
            network_of(task, stage)
        if not isinstance(self.rubric, Rubric):
            raise TaskError(
                f"the rubric of env {task.env!r} is a {type(self.rubric).__name__}",
                "Rubric((function, weight), ...)",
            )

    def tools(self, task: Task) -> tuple[ToolSpec, ...]:
        names = self._prompting(task).tool_names
        own = (spec for name, spec in self.own_tools.items() if names is None or name in names)
        return (*own, *self._inside(task))

    def _inside(self, task: Task) -> tuple[ToolSpec, ...]:
        """The tools that run in the sandbox: those of the setting `tools`, else `offers`; and those
        that the row adds. Raises TaskError.
        """
        names = self._prompting(task).tool_names
        offers = self.offers if names is None else self._offered(names)
        if "tools" not in task.data:
            return offers
        return (*offers, *(spec for spec in task_tools(task) if spec not in offers))

    def _offered(self, names: Sequence[str]) -> tuple[ToolSpec, ...]:
        """Returns the tools of a setting `tools` that run in the sandbox. Raises TaskError."""
        theirs = {spec.name: spec for spec in self.offers}
        inside = (name for name in names if name not in self.own_tools)
        offered = tuple(theirs.get(name) or spec_by_name(name) for name in inside)
        if self.works_in_sandbox and not offered:
            raise TaskError(
                f"`tools` = {', '.join(names) or 'none'} for the env {self.name!r}",
                "at least one tool that runs in the sandbox, where the policy's work lies",
            )
        return offered

    def _prompting(self, task: Task) -> PromptSettings:
        """The settings of a task that concern its prompt. Raises TaskError."""
        settings = record_of(self).of(task)
        return settings if isinstance(settings, PromptSettings) else PromptSettings()

    def sandbox(self, task: Task, stage: Stage) -> SandboxSpec | None:
        """The sandbox that a task needs; None where it needs none.

        RUN needs one if some tool runs in it, EVAL if the rubric does.
        """
        inside = self._inside(task) if stage is Stage.RUN else ()
        if not inside and not (stage is Stage.EVAL and self.scores_in_sandbox):
            return None
        return spec_of(task, inside)

    def messages(self, task: Task) -> tuple[Message, ...]:
        """`system_message` unless a setting has another, then `question`."""
        system = self._prompting(task).system
        system = self.system_message(task) if system is None else system
        user = Message(role="user", content=self.question(task))
        return (Message(role="system", content=system), user) if system else (user,)

    def system_message(self, task: Task) -> str:
        """The system message where no setting has another: `system`."""
        return self.system

    def question(self, task: Task) -> str:
        """The user's message: the prompt as it is."""
        return task.prompt

    async def prepare(self, task: Task, sandbox: Sandbox | None) -> None:
        """Nothing: the workspace starts empty."""

    async def call(
        self, task: Task, sandbox: Sandbox | None, call: ToolCall, timeout_s: float
    ) -> ToolResult:
        """Run a tool: of its own here, any other in the sandbox."""
        spec, tools = self.own_tools.get(call.name), self.tools(task)
        if spec not in tools or call.error:
            return await run_call(tools, sandbox, call, timeout_s)
        assert spec is not None
        if problem := call_problem((spec,), call):
            return ToolResult(output=problem, exit_code=BAD_CALL)
        with boundary(RolloutError, FailureCode.STAGE_ERROR, f"tool {call.name}"):
            method = getattr(self, call.name)
            answer = method(task, **state_argument(method) | dict(call.arguments))
            return ToolResult(output=str(await answer if inspect.isawaitable(answer) else answer))

    def repeats(self, call: ToolCall) -> bool:
        """Returns whether a call may run again: calls that run in the sandbox are remembered
        there.
        """
        return bool(call.error) or call.name not in self.own_tools or call.name in self.repeatable

    async def artifact(self, task: Task, final: str, sandbox: Sandbox | None) -> bytes:
        """The final answer's text, its end where it is long."""
        return final.strip().encode("utf-8", "replace")[-MAX_ARTIFACT_BYTES:]

    async def score(
        self, task: Task, artifact: bytes, sandbox: Sandbox | None, deadline: Deadline
    ) -> Score:
        return await self.rubric.score(task, artifact, sandbox, deadline)

    def reference(self, task: Task) -> Reference:
        """Raises NoReferenceError."""
        raise NoReferenceError(
            f"task {task.task_id!r}: the env {task.env!r} knows no reference solution",
            "a method `reference`",
        )


def check_settings(env: Env, values: Mapping[str, Json], where: str) -> None:
    """Raise TaskError, which begins with `where`, for settings that an env does not take."""
    settings = record_of(env).read(values, where)
    if isinstance(settings, PromptSettings) and isinstance(env, BaseEnv):
        try:
            BaseEnv.tools(env, Task(task_id=where, env=env.name, prompt="", data={KEY: values}))
        except TaskError as error:
            raise TaskError(f"{where}: {error.problem}", error.expected, error.hint) from None


def requirements_of(task: Task) -> tuple[str, ...]:
    """Returns the Python packages that `data.requirements` names. Raises TaskError.

    It is a list of requirements, or the text of a requirements.txt without options.
    """
    requirements: Json = task.data.get("requirements") or []
    lines = requirements.splitlines() if isinstance(requirements, str) else requirements
    if not isinstance(lines, list) or not all(isinstance(line, str) for line in lines):
        raise TaskError(
            f"task {task.task_id!r}: data.requirements is {requirements!r}"[:300],
            "a list of requirements, or the text of a requirements.txt",
        )
    packages = [line for raw in lines if (line := _COMMENT.sub("", raw).strip())]
    if options := [line for line in packages if line.startswith("-") or "\\" in line]:
        raise TaskError(
            f"task {task.task_id!r}: data.requirements has {options[0]!r}",
            "names of packages with their versions, no options",
            "say where wheels are in data.wheels",
        )
    return tuple(packages)


def wheels_of(task: Task) -> str:
    """Returns `data.wheels`: a folder of the node, an index's URL, or `host`. Raises TaskError."""
    wheels: Json = task.data.get("wheels") or ""
    is_location = isinstance(wheels, str) and (wheels[:1] in ("", "/") or "://" in wheels)
    if not is_location and wheels != HOST_WHEELS:
        raise TaskError(
            f"task {task.task_id!r}: data.wheels is {wheels!r}"[:300],
            f"the absolute path of a folder of wheels, an index's URL, or {HOST_WHEELS!r}",
        )
    return str(wheels)


_OWN = {"image", "tools", "requirements", "wheels", "workdir", "variables"}
_OWN |= {"network_mode", "allowed_hosts"}
"""Fields of SandboxSpec that are fields of `task.data`, or an env's own."""
_RESOURCES = {field.name for field in fields(SandboxSpec)} - _OWN


def spec_of(task: Task, tools: Sequence[ToolSpec]) -> SandboxSpec:
    """Returns a sandbox with the task's image and resources. Raises TaskError."""
    resources = _resources(task)
    spec = SandboxSpec(
        image=task.data.get("image", ""),
        tools=tuple(spec.name for spec in tools),
        requirements=requirements_of(task),
        wheels=wheels_of(task),
    )
    if spec.image and spec.requirements:
        raise field_error(
            task,
            "data.requirements beside data.image",
            "one of them: an image brings its own packages",
        )
    return replace(spec, **resources)


def _resources(task: Task) -> Mapping[str, Json]:
    """Returns fields of SandboxSpec that `data.sandbox` sets. Raises TaskError."""
    resources: Json = task.data.get("sandbox", {})
    if not isinstance(resources, Mapping):
        raise field_error(task, f"data.sandbox is {resources!r}", "an object")
    if unknown := sorted(set(resources) - _RESOURCES):
        expected = ", ".join(sorted(_RESOURCES))
        raise field_error(task, f"data.sandbox has {', '.join(unknown)}", expected)
    plain = SandboxSpec()
    for name, value in resources.items():
        kind = type(getattr(plain, name))
        fits = isinstance(value, (int, float) if kind is float else kind)
        if not fits or isinstance(value, bool) != (kind is bool) or value < 0:
            expected = f"{kind.__name__}, not negative"
            raise field_error(task, f"data.sandbox.{name} is {value!r}", expected)
    return resources


def tool(
    description: str, **properties: Mapping[str, Json]
) -> Callable[[Callable[..., Json]], Callable[..., Json]]:
    """Mark a method of an env as a tool of the policy's, which runs on the host.

    `properties` are its arguments as JSON schemas, all required. The method takes the task and the
    arguments, which have been checked, and `state` where it reads or changes what the env remembers
    of the rollout (`prorl/env_state.py`); what it gives is shown as text. What it raises is our
    fault, not the policy's: say what went wrong in the answer. Raises ConfigError for a method that
    takes other arguments than the policy is told of.
    """

    def mark(method: Callable[..., Json]) -> Callable[..., Json]:
        _check_arguments(method, set(properties))
        spec = make_spec(method.__name__, description, tuple(properties), **properties)
        method.tool_spec = spec  # type: ignore[attr-defined]
        return method

    return mark


def _check_arguments(method: Callable[..., Json], names: set[str]) -> None:
    parameters = list(inspect.signature(method).parameters.values())[2:]
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return
    parameters = [each for each in parameters if each.name != "state" or "state" in names]
    required = {parameter.name for parameter in parameters if parameter.default is parameter.empty}
    if not required <= names <= {parameter.name for parameter in parameters}:
        signature = ", ".join(parameter.name for parameter in parameters) or "nothing"
        raise ConfigError(
            f"tool {method.__name__!r} takes {signature} behind the task",
            f"the arguments that @tool describes: {', '.join(sorted(names)) or 'none'}",
        )
