"""A run's renderer, made and proved in a process of its own before the run is accepted.

A chat template and a user's renderer are code of strangers, and a vocabulary is 100 MB in memory:
none belongs in the gateway. The process is a helper (`prorl/helper`) with limits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from prorl.config.renderer import RendererSpec
from prorl.errors import ConfigError, UserError
from prorl.helper.child import Answer, serve
from prorl.helper.process import Helper, HelperError, HelperProgram
from prorl.renderer.load import SAMPLE, describe, is_ours, make_renderer
from prorl.types import Message
from prorl.waits import wait_limit_s

if TYPE_CHECKING:
    from prorl.types import Json

MEMORY_BYTES = 8 << 30
CPU_S = 60.0
WALL_S = wait_limit_s("renderer.check")
USERS_S = wait_limit_s("renderer.check_users")


async def check(spec: RendererSpec) -> dict[str, Json]:
    """Returns the facts about a renderer that the run's manifest keeps. Raises ConfigError with
    what is missing.
    """
    if spec == RendererSpec(model="bytes", date=spec.date):
        return describe(make_renderer(spec), spec)
    if is_ours(spec):
        label, wall_s = f"the check of {spec.model}'s chat template", WALL_S
    else:
        label, wall_s = f"renderer {spec.name!r}", USERS_S
    program = HelperProgram("prorl.renderer.check", cpu_s=CPU_S, memory_bytes=MEMORY_BYTES)
    try:
        helper = await Helper.start(program)
        try:
            facts: dict[str, Json] = await helper.ask(spec, label=label, wall_s=wall_s)
        finally:
            helper.end()
    except UserError as error:
        raise ConfigError(error.problem, error.expected, error.hint) from None
    except HelperError as error:
        raise ConfigError(
            str(error) if label in error.words else f"{label}: {error}",
            f"one that is made and proved within {CPU_S:g} s and {MEMORY_BYTES >> 30} GiB",
            "try `prorl doctor --model DIR`" if is_ours(spec) else "mend it there",
        ) from None
    return facts


def prepare() -> Answer:
    return _prove


def _prove(spec: RendererSpec) -> Json:
    renderer = make_renderer(spec)
    if not is_ours(spec):
        renderer.prompt([Message(role="user", content=SAMPLE)], ())
    return describe(renderer, spec)


if __name__ == "__main__":
    serve(prepare)
