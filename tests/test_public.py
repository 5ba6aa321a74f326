"""What `import prorl` promises: the names, and that it costs nothing."""

from __future__ import annotations

import subprocess
import sys

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
