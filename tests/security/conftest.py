"""A sandbox for every attack."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest_asyncio

from tests.sandbox.conftest import Sandboxd, kind, sandboxd, shared  # noqa: F401 - fixtures
from tests.security.box import SPEC, Box


@pytest_asyncio.fixture(loop_scope="module")
async def box(kind: str, sandboxd: Sandboxd) -> AsyncIterator[Box]:  # noqa: F811
    ref = await sandboxd.host.start("run/1/1", "run", SPEC)
    async with sandboxd.host.connect(ref) as sandbox:
        yield Box(kind, sandboxd, ref, sandbox)
