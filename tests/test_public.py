"""What `import prorl` promises: the names, and that it costs nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

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


def test_import_prorl_loads_nothing_heavy() -> None:
    assert not _modules_after("import prorl") & set(HEAVY)


def test_the_help_page_loads_neither_arrow_nor_pydantic() -> None:
    loaded = _modules_after("from prorl.cli.app import dispatch; assert dispatch(['--help']) == 0")
    assert not loaded & {"pyarrow", "torch", "duckdb", "pydantic", "numpy", "fastapi", "aiohttp"}
    assert "prorl.cli.commands.run" not in loaded


def test_the_supervisor_loads_neither_arrow_nor_torch() -> None:
    assert not _modules_after("import prorl.supervisor.service") & {
        "pyarrow",
        "torch",
        "duckdb",
        "numpy",
    }


def test_the_gateway_loads_an_http_client_for_model_servers_only() -> None:
    loaded = _modules_after("import prorl.service.__main__")
    assert "fastapi" in loaded
    assert not loaded & {"aiohttp", "torch", "duckdb", "pyarrow.parquet", "yaml", "cryptography"}


def test_a_stage_worker_loads_what_it_serves_with_only() -> None:
    loaded = _modules_after("import prorl.stages.__main__")
    assert "pyarrow.flight" in loaded
    assert not loaded & {
        *("aiohttp", "duckdb", "fastapi", "fsspec", "jinja2", "prometheus_client"),
        *("pyarrow.dataset", "pyarrow.parquet", "tokenizers", "torch", "yaml"),
    }


def test_a_job_is_checked_before_arrow_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text('{"task_id": "1", "env": "noop", "prompt": "do nothing"}\n')
    flags = {"tasks": str(tmp_path / "t.jsonl"), "policy": "noop"}
    made = f"JobPlan.make(None, {flags}, (), root={str(tmp_path / 'root')!r})"
    loaded = _modules_after(f"from prorl.cli.job import JobPlan; {made}")
    assert "prorl.envs.noop" in loaded
    assert not loaded & {"pyarrow", "numpy", "duckdb", "aiohttp", "fastapi"}
