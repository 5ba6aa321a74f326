"""A run's renderer, made and proved in a process of its own before the run is accepted.

A chat template is code of strangers and a vocabulary is 100 MB in memory: neither belongs in the
gateway. The child has `MEMORY_BYTES` and `CPU_S`, and is ended after `WALL_S`.

    python -m prorl.renderer.check < spec.json     one line of JSON: {"facts"} or {"refused"}
"""

from __future__ import annotations

import asyncio
import resource
import sys
from asyncio.subprocess import PIPE
from contextlib import suppress
from typing import TYPE_CHECKING

import orjson

from prorl.config.renderer import RendererSpec
from prorl.errors import ConfigError, UserError
from prorl.renderer.load import describe, make_renderer

if TYPE_CHECKING:
    from prorl.types import Json

MEMORY_BYTES = 8 << 30
CPU_S = 60
WALL_S = 600.0


async def check(spec: RendererSpec) -> dict[str, Json]:
    """What the run's manifest keeps. Raises ConfigError with what is missing."""
    if spec == RendererSpec(model="bytes", date=spec.date):
        return describe(make_renderer(spec), spec)
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "prorl.renderer.check", stdin=PIPE, stdout=PIPE, stderr=PIPE
    )
    try:
        async with asyncio.timeout(WALL_S):
            out, errors = await child.communicate(spec.to_json().encode())
    except TimeoutError:
        raise _ended(spec, f"took longer than {WALL_S:g} s") from None
    finally:
        if child.returncode is None:
            with suppress(ProcessLookupError):
                child.kill()
            await child.wait()
    return _found(spec, out, f"ended with status {child.returncode} {_last_line(errors)}")


def _found(spec: RendererSpec, out: bytes, end: str) -> dict[str, Json]:
    """What the child printed; `end` says how one ended that printed nothing. Raises ConfigError."""
    try:
        found = orjson.loads(out)
    except orjson.JSONDecodeError:
        raise _ended(spec, end) from None
    if "refused" in found:
        raise ConfigError(*found["refused"])
    facts: dict[str, Json] = found["facts"]
    return facts


def _last_line(errors: bytes) -> str:
    return (errors.decode("utf-8", "replace").strip().splitlines() or [""])[-1][:300]


def _ended(spec: RendererSpec, how: str) -> ConfigError:
    return ConfigError(
        f"the check of {spec.model}'s chat template {how}",
        f"a model that is proved within {CPU_S} s and {MEMORY_BYTES >> 30} GiB",
        "try `prorl doctor --model DIR`",
    )


def main() -> None:
    """Read a spec, print what was found."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    spec = RendererSpec.from_json(sys.stdin.read())
    try:
        found: Json = {"facts": describe(make_renderer(spec), spec)}
    except UserError as error:
        found = {"refused": [error.given, error.expected, error.hint]}
    sys.stdout.buffer.write(orjson.dumps(found))


if __name__ == "__main__":
    main()
