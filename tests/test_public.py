"""Tests of the promises of `import prorl`: the names, and that it costs nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import prorl

HEAVY = (
    "pyarrow",
    "torch",
    "duckdb",
    "pydantic",
    "numpy",
    "fastapi",
    "aiohttp",
    "rich",
    "cyclopts",
)


def test_the_public_names_are_pinned() -> None:
    expected = [
        "Client",
        "Message",
        "PackedBatch",
        "ProrlError",
        "RolloutLimits",
        "RunConfig",
        "SamplingParams",
        "ServiceConfig",
        "Task",
    ]
    assert prorl.__all__ == sorted(prorl.__all__)
    assert prorl.__all__ == [*expected, "__version__", "connect", "load_tasks", "open"]
    assert dir(prorl) == prorl.__all__
    for name in prorl.__all__:
        assert getattr(prorl, name) is not None
    assert not hasattr(prorl, "nonsense")


def _modules_after(code: str) -> set[str]:
    out = subprocess.run(
        [sys.executable, "-c", f"{code}; import sys; print(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    )
    return set(out.stdout.split())


@pytest.mark.parametrize(
    ("code", "expected_module", "without"),
    [
        ("import prorl", "prorl", HEAVY),
        (
            "from prorl.cli.app import dispatch; assert dispatch(['--help']) == 0",
            "cyclopts",
            (*(set(HEAVY) - {"cyclopts", "rich"}), "prorl.cli.commands.run"),
        ),
        (
            "import prorl.cli.commands.serve, prorl.client.http",
            "prorl.supervisor.service",
            ("pyarrow", "torch", "duckdb", "numpy", "aiohttp", "fastapi"),
        ),
        (
            "import prorl.cli.run_job, prorl.cli.job",  # until its service is being started
            "prorl.supervisor.service",
            ("pyarrow", "torch", "duckdb", "numpy"),
        ),
        (
            "import prorl.deploy.service, prorl.stages.chain, prorl.storage.serve.service",
            "pyarrow.flight",
            ("torch", "duckdb"),
        ),
        (
            "import prorl.deploy.service",
            "fastapi",
            ("aiohttp", "torch", "duckdb", "pyarrow.parquet", "yaml", "cryptography"),
        ),
        (
            "import prorl.stages.__main__",
            "pyarrow.flight",
            (
                *("aiohttp", "duckdb", "fastapi", "fsspec", "jinja2", "prometheus_client"),
                *("pyarrow.dataset", "pyarrow.parquet", "tokenizers", "torch", "yaml"),
            ),
        ),
        (  # a run of scripts plays with the extra `serve` alone
            "import asyncio; from prorl.renderer.check import RendererSpec, check;"
            " asyncio.run(check(RendererSpec(model='bytes')))",
            "prorl.renderer.load",
            ("jinja2", "tokenizers"),
        ),
    ],
)
def test_a_process_loads_what_it_needs_only(
    code: str, expected_module: str, without: tuple[str, ...]
) -> None:
    loaded = _modules_after(code)
    assert expected_module in loaded
    assert not loaded & set(without)


def test_a_job_is_checked_before_arrow_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text('{"task_id": "1", "env": "noop", "prompt": "do nothing"}\n')
    flags = {"tasks": str(tmp_path / "t.jsonl"), "policy": "noop"}
    made = f"JobPlan.make(None, {flags}, (), root={str(tmp_path / 'root')!r})"
    loaded = _modules_after(f"from prorl.cli.job import JobPlan; {made}")
    assert "prorl.envs.noop" in loaded
    assert not loaded & {"pyarrow", "numpy", "duckdb", "aiohttp", "fastapi"}
