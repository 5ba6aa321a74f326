"""Users' tools by entry point: the schema reaches the policy, the call runs inside the sandbox, and
mistakes are told before a rollout.
"""

from __future__ import annotations

import asyncio
import io
import socket
import zipfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

import prorl.sandbox
from prorl.envs import tools
from prorl.envs.math import MathEnv
from prorl.errors import SandboxError, TaskError
from prorl.renderer import ChatMLRenderer
from prorl.sandbox.client import ConnectedSandbox
from prorl.sandbox.host import UnixSandboxHost
from prorl.tokenizer import ByteTokenizer
from prorl.tools import bundle as bundles
from prorl.types import FailureCode, Json, SandboxSpec, Stage, Task
from tests.sandbox.conftest import end, folder, start_daemon, why_not
from tests.user_package import installed

__all__ = ["folder"]

SCHEMA = '{"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}'
WEATHER = f"""
    import os, socket
    from importlib import resources
    from acme.units import degrees

    class Weather:
        description = "Weather in one city."
        parameters = {SCHEMA}

        def __init__(self):
            self.calls = 0

        def __call__(self, city):
            self.calls += 1
            match city:
                case "nowhere":
                    raise LookupError("no such city")
                case "limbo":
                    while True:
                        pass
                case "grave":
                    os._exit(7)
                case "raw":
                    return {{"degrees": [4, None]}}
                case "silent":
                    return None
                case "odd":
                    return object()
                case "file":
                    return resources.files("acme").joinpath("cities.txt").read_text()
                case "open":
                    return sorted(int(name) for name in os.listdir("/proc/self/fd"))
            print("asked for", city)
            where = f"{{city}} on {{socket.gethostname()}}"
            return f"{{degrees(4)}} in {{where}}, call {{self.calls}}, uid {{os.getuid()}}"
"""
FILES = {
    "acme/__init__.py": "",
    "acme/tools.py": WEATHER,
    "acme/units.py": "def degrees(n):\n    return f'{n} degrees'\n",
    "acme/cities.txt": "Oslo\n",
    "acme/here.py": (
        f"""
        import os

        class Here:
            description = "Works on the host only."
            parameters = {SCHEMA}

            def __init__(self):
                if os.environ["USER"] == "user":
                    raise RuntimeError("no display")

            def __call__(self, city):
                return city
    """
    ),
    "acme/slow.py": (
        f"""
        import time

        class Slow:
            description, parameters = "Is made for ever.", {SCHEMA}

            def __init__(self):
                time.sleep(60)

            def __call__(self, city): ...
    """
    ),
    "acme/bad.py": (
        f"""
        class NoText:
            parameters = {SCHEMA}
            def __call__(self, city): ...

        class NoCall:
            description, parameters = "x", {SCHEMA}

        class NoSchema:
            description, parameters = "x", "city"
            def __call__(self): ...

        class OddType:
            city = {{"type": ["string", "null"]}}
            description = "x"
            parameters = {{"type": "object", "properties": {{"city": city}}}}
            def __call__(self, city): ...
    """
    ),
    "compiled/__init__.py": "",
    "compiled/fast.so": "",
}
TOOLS = {
    "weather": "acme.tools:Weather",
    "here": "acme.here:Here",
    "slow": "acme.slow:Slow",
    "sick": "acme.nothing:X",
    "fast": "compiled:Fast",
    "no-text": "acme.bad:NoText",
    "no-call": "acme.bad:NoCall",
    "no-schema": "acme.bad:NoSchema",
    "odd-type": "acme.bad:OddType",
    "bash": "acme.tools:Weather",
}


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("USER", "somebody")
    tools.user_spec.cache_clear()
    with installed(tmp_path / "site", "acme", FILES, {"prorl.tools": TOOLS}, monkeypatch):
        yield
    tools.user_spec.cache_clear()


def _task(*tools: Json) -> Task:
    return Task(
        task_id="t/0",
        env="math",
        prompt="How warm is it?",
        data={"answer": "4", "tools": list(tools)},
    )


# ---- on the host


@pytest.mark.usefixtures("package")
def test_the_schema_is_rendered_to_the_policy_and_the_sandbox_calls_the_tool() -> None:
    env, task = MathEnv(), _task("weather")
    env.check(task)
    tokenizer = ByteTokenizer()
    prompt = tokenizer.decode(ChatMLRenderer(tokenizer).prompt(env.messages(task), env.tools(task)))
    assert '"weather"' in prompt
    assert "Weather in one city." in prompt
    spec = env.sandbox(task, Stage.RUN)
    assert spec is not None
    assert spec.tools == ("python", "weather")


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize(
    ("tool", "says"),
    [
        ("wether", r"unknown tool 'wether'.*did you mean 'weather'\?"),
        ("ipyton", r"unknown tool 'ipyton'.*did you mean 'ipython'\?"),
        ("sick", r"tool 'sick' cannot be imported from acme.nothing:X: ModuleNotFoundError"),
        ("no-text", r"tool 'no-text': its description is None"),
        ("no-call", r"tool 'no-call' is <class .*; expected a class with a method __call__"),
        ("no-schema", r"tool 'no-schema': its parameters: 'city' is no object schema"),
        (
            "odd-type",
            r"tool 'odd-type': its parameters: property 'city' has type \['string', 'null'\]",
        ),
        (3, r"data.tools is \[3\]"),
    ],
)
def test_a_mistake_is_the_tasks_before_it_is_accepted(tool: Json, says: str) -> None:
    with pytest.raises(TaskError, match=says):
        MathEnv().check(_task(tool))


@pytest.mark.usefixtures("package")
def test_the_zip_holds_the_package_whole_and_says_what_it_leaves_out() -> None:
    bundle = bundles.build_user()
    assert bundle.content == bundles.build_user().content
    names = zipfile.ZipFile(io.BytesIO(bundle.content)).namelist()
    assert {"acme/__init__.py", "acme/tools.py", "acme/cities.txt", bundles.INDEX} <= set(names)
    assert not [name for name in names if name.startswith("compiled")]
    assert "holds compiled fast.so" in bundle.problems["fast"]
    assert "weather" in bundle.names


# ---- inside


@pytest.fixture
async def sandbox(package: None) -> AsyncIterator[ConnectedSandbox]:
    async with prorl.sandbox.open(
        "pyns", SandboxSpec(tools=("bash", "python", "weather"))
    ) as sandbox:
        yield sandbox


async def test_a_call_runs_inside_and_keeps_its_state(sandbox: ConnectedSandbox) -> None:
    first = await sandbox.call("weather", {"city": "Oslo"}, 10.0)
    assert (first.exit_code, first.output) == (
        0,
        "asked for Oslo\n4 degrees in Oslo on sandbox, call 1, uid 1000",
    )
    assert socket.gethostname() != "sandbox"
    assert "call 2" in (await sandbox.call("weather", {"city": "Rome"}, 10.0)).output
    for city, output in (("raw", '{"degrees": [4, null]}'), ("silent", ""), ("file", "Oslo\n")):
        assert (await sandbox.call("weather", {"city": city}, 10.0)).output == output


async def test_what_goes_wrong_in_a_call_is_a_result(sandbox: ConnectedSandbox) -> None:
    raised = await sandbox.call("weather", {"city": "nowhere"}, 10.0)
    assert raised.exit_code == 1
    assert "LookupError: no such city" in raised.output
    assert "prorl" not in raised.output
    assert "not JSON serializable" in (await sandbox.call("weather", {"city": "odd"}, 10.0)).output
    assert (await sandbox.call("weather", {"town": "Oslo"}, 10.0)).exit_code == 1
    hung = await sandbox.call("weather", {"city": "limbo"}, 0.3)
    assert (hung.timed_out, hung.exit_code) == (True, 124)
    # the interrupt cost no state
    assert "call 4" in (await sandbox.call("weather", {"city": "Oslo"}, 10.0)).output
    died = await sandbox.call("weather", {"city": "grave"}, 10.0)
    assert died.exit_code == 7
    assert "the tool ended; the next call starts a new one" in died.output
    assert "call 1," in (await sandbox.call("weather", {"city": "Oslo"}, 10.0)).output


async def test_the_agent_can_neither_replace_the_tool_nor_read_what_is_not_its_own(
    sandbox: ConnectedSandbox,
) -> None:
    await sandbox.put("acme/tools.py", b"raise SystemExit('mine')")
    await sandbox.put("socket.py", b"raise SystemExit('mine')")
    await sandbox.call("weather", {"city": "grave"}, 10.0)
    assert "4 degrees" in (await sandbox.call("weather", {"city": "Oslo"}, 10.0)).output
    # three outputs, the server's socket, the zip; and the listing itself
    assert await _open_in(sandbox, "weather") == 5
    listed = await sandbox.call(
        "bash",
        {"command": "ls -l /proc/$$/fd; for f in /proc/$$/fd/*; do [ -f $f ] && head -c2 $f; done"},
        10.0,
    )
    assert "tools.zip" not in listed.output
    assert "PK" not in listed.output


async def _open_in(sandbox: ConnectedSandbox, tool: str) -> int:
    listed: list[int] = eval((await sandbox.call(tool, {"city": "open"}, 10.0)).output)
    return len(listed) - 1


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize(
    ("tool", "says"),
    [
        ("here", "tool 'here' does not start inside the sandbox: .*RuntimeError: no display"),
        ("fast", "cannot be packed: compiled holds compiled fast.so"),
        ("nobody", "no tool 'nobody' on this node; there are bash, .*weather"),
    ],
)
async def test_a_tool_that_cannot_work_inside_fails_the_start_as_bad_task(
    tool: str, says: str
) -> None:
    with pytest.raises(SandboxError, match=f"(?s){says}") as caught:
        async with prorl.sandbox.open("pyns", SandboxSpec(tools=("bash", tool))):
            pass
    assert caught.value.code is FailureCode.BAD_TASK


@pytest.mark.slow
@pytest.mark.usefixtures("package")
async def test_a_tool_that_takes_too_long_to_make_is_no_fault_of_the_task() -> None:
    with pytest.raises(
        SandboxError, match="'slow' does not start inside the sandbox: it was not made in 25 s"
    ) as caught:
        async with prorl.sandbox.open("pyns", SandboxSpec(tools=("slow",))):
            pass
    assert caught.value.code is FailureCode.SANDBOX_START


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize("kind", ["local", pytest.param("apptainer", marks=pytest.mark.apptainer)])
async def test_every_kind_serves_it_and_leaves_nothing(kind: str, folder: Path) -> None:
    if reason := await asyncio.to_thread(why_not, kind):
        pytest.skip(reason)
    daemon = await start_daemon(kind, folder)
    try:
        await _ask_twice(daemon.host)
    finally:
        await end(daemon)
    assert not list((folder / "root").rglob("tools.zip"))


async def _ask_twice(host: UnixSandboxHost) -> None:
    for number in range(2):
        ref = await host.start(f"run/{number}/1", "run", SandboxSpec(tools=("bash", "weather")))
        async with host.connect(ref) as sandbox:
            assert (
                "4 degrees in Oslo"
                in (await sandbox.call("weather", {"city": "Oslo"}, 10.0)).output
            )
            assert await _open_in(sandbox, "weather") == 5
    with pytest.raises(SandboxError, match="no display") as caught:
        await host.start("run/9/1", "run", SandboxSpec(tools=("here",)))
    assert caught.value.code is FailureCode.BAD_TASK
