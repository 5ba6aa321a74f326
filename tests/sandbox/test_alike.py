"""Tests that an agent's shell meets the same in every kind that contains it."""

from __future__ import annotations

import pytest

from prorl.sandbox.node.probe import probe_kind
from prorl.sandbox.spawn import spawned
from prorl.types import SandboxSpec

DEVICES = """
for name in null zero full random urandom tty; do
  [ -c /dev/$name ] && [ ! -f /dev/$name ] && echo $name
done
{ echo x > /dev/full; } 2> /dev/null || echo refused
head -c 3 /dev/full | od -An -tx1
"""


@pytest.mark.parametrize("kind", ["pyns", pytest.param("apptainer", marks=pytest.mark.slow)])
async def test_devices_and_a_fork_bomb(kind: str) -> None:
    verdict = await probe_kind(kind)
    if not verdict.works:
        pytest.skip(f"{kind} does not work here: {verdict.reason}")
    async with spawned(kind) as (host, _):
        ref = await host.start("alike/1/1", "run", SandboxSpec(tools=("bash",)))
        async with host.connect(ref) as sandbox:
            devices = await sandbox.call("bash", {"command": DEVICES}, 20.0)
            assert devices.output.split() == [
                *("null", "zero", "full", "random", "urandom", "tty"),
                *("refused", "00", "00", "00"),
            ]
            for bomb in (":(){ :|:& };:", "f() { f & f; }; f", "(:(){ :|:& };:) & sleep 60"):
                await sandbox.call("bash", {"command": bomb}, 1.0)
                after = await sandbox.call("bash", {"command": "(exit 5)"}, 10.0)
                assert after.exit_code == 5, (bomb, after.output[-500:])
                assert not after.timed_out
        await host.stop(ref)
