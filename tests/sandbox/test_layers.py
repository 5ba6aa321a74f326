"""Layers of packages: installed once a node, seen alone, in every kind of sandbox."""

from __future__ import annotations

import asyncio
import io
import json
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from contextlib import ExitStack
from pathlib import Path

import pytest

from prorl.errors import SandboxError, StorageError, UserError
from prorl.sandbox.host import UnixSandboxHost
from prorl.sandbox.images.cache import ImageCache
from prorl.sandbox.images.child import make_image
from prorl.sandbox.images.layers import LayerRecipe, ToolFailed, _install, make_layer
from prorl.sandbox.images.registry import Registry
from prorl.sandbox.node.probe import probe_kind
from prorl.sandbox.spawn import spawned
from prorl.types import HOST_WHEELS, FailureCode, SandboxSpec
from tests.sandbox.image_sources import Blobs, serving

KINDS = [
    pytest.param("", id="default"),
    *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("apptainer", "local")),
]
LOOK = "import sys; print([p for p in sys.path if 'packages' in p]); import hello; print(hello.WHO)"


def wheel(folder: Path, name: str = "hello", version: str = "1.0", text: str = "WHO = 1") -> Path:
    folder.mkdir(exist_ok=True)
    about = f"{name}-{version}.dist-info"
    files = {
        f"{name}.py": f"{text}\ndef main(): print('said', WHO)\n",
        f"{about}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{about}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{about}/entry_points.txt": f"[console_scripts]\n{name} = {name}:main\n",
    }
    files[f"{about}/RECORD"] = "".join(f"{path},,\n" for path in (*files, f"{about}/RECORD"))
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for member, content in files.items():
            archive.writestr(member, content)
    return path


async def _ask(host: UnixSandboxHost, spec: SandboxSpec, *argv: str) -> str:
    ref = await host.start(f"layer/{argv[0]}/1", "run", spec)
    async with host.connect(ref) as sandbox:
        done = await sandbox.exec(argv, 30.0)
    await host.stop(ref)
    assert done.exit_code == 0, done.output
    return done.output


@pytest.mark.parametrize("kind", KINDS)
async def test_siblings_share_a_layer_and_see_nothing_of_the_hosts_packages(
    kind: str, sandbox_kind: str, tmp_path: Path
) -> None:
    kind = kind or sandbox_kind
    verdict = await probe_kind(kind)
    if not verdict.works:
        pytest.skip(f"{kind} does not work here: {verdict.reason}")
    wheel(tmp_path / "wheels")
    spec = SandboxSpec(requirements=("hello==1.0",), wheels=str(tmp_path / "wheels"))
    async with spawned(kind, images=str(tmp_path / "images")) as (host, _):
        outputs = await asyncio.gather(*(_ask(host, spec, "python3", "-c", LOOK) for _ in range(4)))
        assert (await _ask(host, spec, "hello")) == "said 1\n"
        write = "from pathlib import Path; import hello; Path(hello.__file__).write_text('')"
        with pytest.raises(AssertionError, match=r"Read-only|Permission denied"):
            await _ask(host, spec, "python3", "-c", write)
        plain = await _ask(host, SandboxSpec(), "python3", "-c", "import sys; print(sys.path)")
    assert len(set(outputs)) == 1
    assert outputs[0].count("site-packages") == 1, "the layer's own"
    assert outputs[0].endswith("1\n")
    assert "layer" not in plain
    assert [image.source for image in Registry(tmp_path / "images").list()] == [
        f"packages hello==1.0 from {tmp_path / 'wheels'}"
    ]


@pytest.mark.skipif(not shutil.which("npm"), reason="this machine has no npm")
async def test_programs_of_npm_stand_beside_those_of_python(
    sandbox_kind: str, tmp_path: Path
) -> None:
    """A program that an install script would have put in place is found without running the
    script.
    """
    wheel(tmp_path / "wheels")
    about = {"name": "said", "version": "1.0.0", "bin": {"said": "said.sh", "own": "own.sh"}}
    about["scripts"] = {"postinstall": f"touch {tmp_path}/ran"}
    members = {
        "package.json": json.dumps(about).encode(),
        "said.sh": b"#!/bin/sh\necho a stub\n",
        "own.sh": b"#!/bin/sh\necho its own\n",
        "said-linux/bin/said": Path("/bin/echo").read_bytes(),
    }
    with tarfile.open(tmp_path / "said.tgz", "w:gz") as archive:
        for name, content in members.items():
            entry = tarfile.TarInfo(f"package/{name}")
            entry.size, entry.mode = len(content), 0o755
            archive.addfile(entry, io.BytesIO(content))
    packages = ("hello==1.0", f"npm:{tmp_path}/said.tgz")
    spec = SandboxSpec(requirements=packages, wheels=str(tmp_path / "wheels"))
    async with spawned(sandbox_kind, images=str(tmp_path / "images")) as (host, _):
        assert await _ask(host, spec, "said", "aloud") == "aloud\n"
        assert await _ask(host, spec, "own") == "its own\n"
        assert await _ask(host, spec, "hello") == "said 1\n"
    assert not (tmp_path / "ran").exists()


async def test_a_node_without_npm_is_at_fault_and_not_the_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(StorageError) as caught:
        await make_image(tmp_path / "images", LayerRecipe(("npm:said@1.0.0",), "").job(), 60.0)
    assert str(caught.value) == (
        "packages npm:said@1.0.0: this node has no npm; install npm on each node, or give the task"
        " an image that has the program"
    )


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        (SandboxSpec(requirements=("nothing-there",), wheels="{wheels}"), "No matching distribut"),
        (SandboxSpec(requirements=("hello",), wheels="/no/folder"), "expected a folder of this"),
        (SandboxSpec(requirements=("hello @ /etc",), wheels="{wheels}"), "could not be installed"),
    ],
)
async def test_what_cannot_be_installed_is_the_tasks_fault(
    spec: SandboxSpec, says: str, sandbox_kind: str, tmp_path: Path
) -> None:
    from dataclasses import replace

    wheel(tmp_path / "wheels")
    spec = replace(spec, wheels=spec.wheels.format(wheels=tmp_path / "wheels"))
    async with spawned(sandbox_kind, images=str(tmp_path / "images")) as (host, _):
        with pytest.raises(SandboxError, match=says) as caught:
            await host.start("layer/1/1", "run", spec)
    assert caught.value.code is FailureCode.BAD_TASK


async def test_modules_of_the_host_are_not_compiled_at_each_start(
    sandbox_kind: str, tmp_path: Path
) -> None:
    """With `-v`, Python names the file that each module's code is from."""
    spec = SandboxSpec(requirements=("pytest",), wheels=HOST_WHEELS)
    async with spawned(sandbox_kind, images=str(tmp_path / "images")) as (host, _):
        script = "python3 -v -c 'import pytest' 2>&1 | grep 'code object from'"
        log = await _ask(host, spec, "bash", "-c", script)
    files = set(re.findall(r"code object from '?(\S*site-packages/[^\s']*)", log))
    assert len(files) > 50
    assert {file for file in files if not file.endswith(".pyc")} == set()


PROGRAMS = {
    "bash": {"command": "python3 <<'EOF'\n{}\nEOF"},
    "python": {"code": "{}"},
    "ipython": {"code": "{}"},
    "jupyter": {"code": "{}"},
}
ENVIRONMENT = """
import hello, importlib, subprocess, sys, yaml
print(hello.WHO, yaml.__name__, yaml.WHO, "site-packages" in yaml.__file__)
print(importlib.metadata.version("hello"))
"""


@pytest.mark.parametrize("kind", KINDS)
async def test_every_interpreter_has_the_packages_of_the_task(
    kind: str, sandbox_kind: str, tmp_path: Path
) -> None:
    """The host has another package of one name: the task's is found first, whoever asks."""
    wheel(tmp_path / "wheels")
    wheel(tmp_path / "wheels", "yaml", text="WHO = 2")
    spec = SandboxSpec(
        requirements=("hello==1.0", "yaml==1.0"),
        wheels=str(tmp_path / "wheels"),
        tools=tuple(PROGRAMS),
        memory_bytes=2 << 30,
    )
    code = f"import importlib.metadata{ENVIRONMENT}"
    replies = {}
    async with spawned(kind or sandbox_kind, images=str(tmp_path / "images")) as (host, _):
        ref = await host.start("layer/table/1", "run", spec)
        async with host.connect(ref) as sandbox:
            for tool, arguments in PROGRAMS.items():
                filled = {name: text.replace("{}", code) for name, text in arguments.items()}
                done = await sandbox.call(tool, filled, 60.0)
                replies[tool] = done.output.strip()
            hidden = await sandbox.call("python", {"code": "import orjson"}, 20.0)
        await host.stop(ref)
    assert replies == dict.fromkeys(PROGRAMS, "1 yaml 2 True\n1.0"), replies
    assert "No module named 'orjson'" in hidden.output


def test_a_layer_is_named_by_all_that_it_is_made_from(tmp_path: Path) -> None:
    wheel(tmp_path / "wheels")
    recipe = LayerRecipe(("hello",), str(tmp_path / "wheels"))
    digests = {recipe.digest(), LayerRecipe(("hello",), "https://index.example/simple").digest()}
    assert recipe.digest() == LayerRecipe(("hello",), str(tmp_path / "wheels")).digest()
    wheel(tmp_path / "wheels", text="WHO = 22")
    digests |= {recipe.digest(), LayerRecipe(("hello", "pytest"), recipe.wheels).digest()}
    digests.add(LayerRecipe(("pytest",), "host").digest())
    assert len(digests) == 5


@pytest.mark.parametrize(
    ("status", "mistake"), [(0, False), (503, False), (504, False), (404, True)]
)
def test_an_index_that_does_not_answer_is_no_mistake_of_the_task(
    status: int, mistake: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PIP_RETRIES", "0")
    tree = tmp_path / "tree"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tree], check=True)
    with ExitStack() as stack:
        server = stack.enter_context(serving(Blobs()))
        server.busy, server.busy_status = 1000, status
        if not status:  # nobody listens there any longer
            stack.close()
        job = {"source": "hello", "wheels": f"http://{server.host}/simple"}
        with pytest.raises(ToolFailed) as caught:
            _install(["hello"], tree, tmp_path, job)
    assert caught.value.mistake is mistake, caught.value


async def test_a_layer_that_failed_by_no_mistake_is_tried_again(tmp_path: Path) -> None:
    """The first time this machine has no place for it."""
    wheel(tmp_path / "wheels")
    recipe = LayerRecipe(("hello",), str(tmp_path / "wheels"))
    cache = ImageCache(tmp_path / "images")
    (tmp_path / "images").touch()
    with pytest.raises(SandboxError) as caught:
        await cache.layer(recipe)
    assert caught.value.code is FailureCode.SANDBOX_START
    assert str(caught.value).count(recipe.about) == 1
    (tmp_path / "images").unlink()
    assert Path(await cache.layer(recipe)).is_dir()


async def test_a_layer_that_another_node_uses_is_used_at_once(tmp_path: Path) -> None:
    """Two nodes of one host share a registry; what one holds the other need not wait for."""
    wheel(tmp_path / "wheels")
    recipe = LayerRecipe(("hello",), str(tmp_path / "wheels"))
    cache, other = (ImageCache(tmp_path / "images") for _ in range(2))
    try:
        folder = await cache.layer(recipe)
        async with asyncio.timeout(60):
            assert await other.layer(recipe) == folder
        job = await asyncio.to_thread(recipe.job)
        made = await asyncio.to_thread(make_layer, Registry(tmp_path / "images"), job)
        assert made.digest == job["digest"]
    finally:
        await cache.close()
        await other.close()


@pytest.mark.parametrize(("name", "says"), [("pytest ==", "as pip reads"), ("pytest<1", "has")])
def test_a_host_requirement_that_cannot_be_met_is_refused(name: str, says: str) -> None:
    with pytest.raises(UserError, match=says) as caught:
        LayerRecipe((name,), "host").digest()
    assert "\n" not in str(caught.value)


def test_a_satisfied_host_requirement_is_accepted() -> None:
    assert LayerRecipe(("pytest>=1",), "host").digest()
