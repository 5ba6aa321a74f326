"""Layers of packages: installed once a node, seen alone, in every kind of sandbox."""

from __future__ import annotations

import asyncio
import zipfile
from pathlib import Path

import pytest

from prorl.errors import SandboxError
from prorl.sandbox.host import UnixSandboxHost
from prorl.sandbox.images.layers import LayerRecipe
from prorl.sandbox.images.registry import Registry
from prorl.sandbox.node.probe import probe_one
from prorl.sandbox.spawn import spawned
from prorl.types import FailureCode, SandboxSpec

KINDS = [
    pytest.param("", id="default"),
    *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("apptainer", "bwrap", "local")),
]
LOOK = "import sys; print([p for p in sys.path if 'packages' in p]); import hello; print(hello.WHO)"


def wheel(folder: Path, name: str = "hello", version: str = "1.0", text: str = "WHO = 1") -> Path:
    """A wheel with one module and a console script."""
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
    found = await probe_one(kind)
    if not found.works:
        pytest.skip(f"{kind} does not work here: {found.reason}")
    wheel(tmp_path / "wheels")
    spec = SandboxSpec(requirements=("hello==1.0",), wheels=str(tmp_path / "wheels"))
    async with spawned(kind, images=str(tmp_path / "images")) as (host, _):
        said = await asyncio.gather(*(_ask(host, spec, "python3", "-c", LOOK) for _ in range(4)))
        assert (await _ask(host, spec, "hello")) == "said 1\n"
        write = "from pathlib import Path; import hello; Path(hello.__file__).write_text('')"
        with pytest.raises(AssertionError, match=r"Read-only|Permission denied"):
            await _ask(host, spec, "python3", "-c", write)
        plain = await _ask(host, SandboxSpec(), "python3", "-c", "import sys; print(sys.path)")
    assert len(set(said)) == 1
    assert said[0].count("site-packages") == 1, "the layer's own"
    assert said[0].endswith("1\n")
    assert "layer" not in plain
    assert [image.source for image in Registry(tmp_path / "images").list()] == [
        f"packages hello==1.0 from {tmp_path / 'wheels'}"
    ]


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


def test_a_layer_is_named_by_all_that_it_is_made_from(tmp_path: Path) -> None:
    wheel(tmp_path / "wheels")
    recipe = LayerRecipe(("hello",), str(tmp_path / "wheels"))
    digests = {recipe.digest(), LayerRecipe(("hello",), "https://index.example/simple").digest()}
    assert recipe.digest() == LayerRecipe(("hello",), str(tmp_path / "wheels")).digest()
    wheel(tmp_path / "wheels", text="WHO = 22")
    digests |= {recipe.digest(), LayerRecipe(("hello", "pytest"), recipe.wheels).digest()}
    digests.add(LayerRecipe(("pytest",), "host").digest())
    assert len(digests) == 5
