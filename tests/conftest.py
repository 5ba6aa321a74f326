"""Fixtures for every folder of tests, and one BLAS thread for every test: two collapse on busy
cores (measured: ten times slower). Bytecode is kept: without it every process that a test starts
compiles what it imports.
"""

# ruff: noqa: E402 - the environment must be set before numpy is loaded
from __future__ import annotations

import os
import sys

sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(name, "1")

import asyncio
import random
import time

import pytest
from hypothesis import settings

# Machines are shared: a slow example is not a wrong one.
settings.register_profile("prorl", deadline=None)
settings.load_profile("prorl")


_BEGAN = time.monotonic()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cpu", action="store_true", help="print the files that use the most CPU")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("cpu"):
        from tests.cpu import CpuTable

        config.pluginmanager.register(CpuTable())


@pytest.fixture(scope="session")
def sandbox_kind() -> str:
    """The cheapest kind that isolates where it works; the others: `tests/sandbox`."""
    from prorl.sandbox.node.probe import probe_kind

    return "pyns" if asyncio.run(probe_kind("pyns")).works else "local"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """`PRORL_TENTH=SEED` (`make test-tenth`) keeps a random tenth of what was selected."""
    seed = os.environ.get("PRORL_TENTH", "")
    if seed:
        kept = set(random.Random(seed).sample(items, max(1, len(items) // 10)))
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = [item for item in items if item in kept]


@pytest.hookimpl(tryfirst=True)  # before fixtures that need Apptainer
def pytest_runtest_setup(item: pytest.Item) -> None:
    """The tenth ends when its time is up: CI runs one each time, not all at once. A test of
    Apptainer is skipped where that does not work, with the reason.
    """
    if item.get_closest_marker("apptainer"):
        from tests.sandbox.conftest import why_not

        if reason := why_not("apptainer"):
            pytest.skip(reason)
    limit_s = float(os.environ.get("PRORL_TENTH_S", "0"))
    if limit_s and time.monotonic() - _BEGAN > limit_s:
        pytest.skip(f"the tenth's {limit_s:g} s are over")
