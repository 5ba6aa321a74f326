"""Fixtures for every folder of tests, and one BLAS thread for every test: two collapse on busy
cores (measured: ten times slower).
"""

# ruff: noqa: E402 - the environment must be set before numpy is loaded
from __future__ import annotations

import os

for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(name, "1")

import asyncio

import pytest
from hypothesis import settings

# Machines are shared: a slow example is not a wrong one.
settings.register_profile("prorl", deadline=None)
settings.load_profile("prorl")


@pytest.fixture(scope="session")
def sandbox_kind() -> str:
    """The cheapest kind that isolates where it works; the others: `tests/sandbox`."""
    from prorl.sandbox.node.probe import probe_one

    return "pyns" if asyncio.run(probe_one("pyns")).works else "local"
