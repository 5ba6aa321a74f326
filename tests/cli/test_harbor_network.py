"""A run whose tasks ask for a network: each phase has its own, and refusals are in the rows."""

from __future__ import annotations

import asyncio
import socketserver
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread

import pytest

from prorl.cli.app import dispatch
from prorl.cli.job import JobPlan
from prorl.cli.run_job import run_plan
from prorl.sandbox.kinds import load
from prorl.storage.read.catalog import query
from prorl.types import Json
from tests.harbor_folders import TOML, make_folder
from tests.sandbox import small_image
from tests.sandbox.conftest import short_folder

ASK = """#!/bin/bash
ask() {
    [ "$HTTP_PROXY" ] || { echo none; return; }
    exec 3<>"/dev/tcp/127.0.0.1/${HTTP_PROXY##*:}" || return
    printf 'CONNECT %%s HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n' "$1" >&3
    read -r _ status _ <&3
    exec 3>&-
    echo "$status"
}
%s
"""
SOLVE = "ask MIRROR > agent; ask 10.0.0.1:80 >> agent; echo 5 > sum.txt"
TEST = """ask 169.254.169.254:80 > verifier
[ "$(< agent)$(< verifier)$(ask MIRROR)" = "$(printf '%s')" ] && r=1 || r=0
echo $r > /logs/verifier/reward.txt"""
NOISE = (
    '\nwhile read -r -N 65536 x; do echo -n "$x"; ((++n < 40)) || break; done < /dev/urandom > n'
)
TASKS = {
    "both": (
        "public",
        "public",
        f"{SOLVE}; echo $(< /etc/own.conf) >> agent",
        r"200\n403\nthe operators403200",
    ),
    "verifier": ("no-network", "public", SOLVE, r"none\nnone403200"),
    "verifier-in-place": ("no-network", "public", SOLVE + NOISE, r"none\nnone403200"),
    "agent-in-place": ("public", "no-network", SOLVE + NOISE, r"200\n403403403"),
}
"""By name: the modes of both phases, what the agent does, and what both hear of the proxy."""


@contextmanager
def _mirror() -> Iterator[str]:
    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.recv(1)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def test_each_phase_has_its_network_also_in_the_agents_own_sandbox(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if missing := load("pyns").missing():
        pytest.skip(missing)
    with short_folder(0o755) as folder, _mirror() as mirror:
        image = small_image.make_image(folder, (*small_image.PROGRAMS, "chmod", "mkdir", "rm"))
        for name, (agent, verifier, solve, answers) in TASKS.items():
            toml = TOML.replace("no-network", agent)
            toml = toml.replace("[verifier]\n", f'[verifier]\nnetwork_mode = "{verifier}"\n')
            parts = {
                "task.toml": toml.replace(
                    "[environment]\n", f'[environment]\ndocker_image = "{image}"\n'
                ),
                "solution/solve.sh": ASK % solve.replace("MIRROR", mirror),
                "tests/test.sh": ASK % (TEST.replace("MIRROR", mirror) % answers),
            }
            make_folder(tmp_path / "tasks" / name, **parts)
        (folder / "own.conf").write_text("the operators\n")
        network = {
            "mode": "allowlist",
            "allowed_hosts": ["a.example"],
            "mirrors": [mirror],
            "files": {str(folder / "own.conf"): "/etc/own.conf"},
        }
        flags: dict[str, Json] = {
            "tasks": str(tmp_path / "tasks"),
            "policy": "oracle",
            "name": "r",
            "run": {"limits": {"artifact_mb": 1}},
            "service": {"workers": 0, "sandbox": {"kind": "pyns", "network": network}},
        }
        root = tmp_path / "root"
        plan = JobPlan.make(None, flags, [], root=root)
        assert asyncio.run(run_plan(plan)) == 0
        notes = capsys.readouterr().err
        assert "4 of 4 tasks ask for more network (public) than" in notes
        rows = query(
            root / "r",
            "select task_id, reward, rescorable, agent_refusals, verifier_refusals from rollouts"
            " order by task_id",
        ).to_pylist()
        inner = {"host": "10.0.0.1", "port": 80, "reason": "not allowed", "times": 1}
        metadata = {**inner, "host": "169.254.169.254"}
        port = int(mirror.rpartition(":")[2])
        hosts = ("169.254.169.254", 80), ("127.0.0.1", port)
        closed = [{"host": h, "port": p, "reason": "no-network", "times": 1} for h, p in hosts]
        assert rows == [
            _row("agent-in-place", False, [inner], closed),
            _row("both", True, [inner], [metadata]),
            _row("verifier", True, [], [metadata]),
            _row("verifier-in-place", False, [], [metadata]),
        ]
        ids = query(root / "r", "select rollout_id from rollouts where task_id = 'both'")
        assert dispatch(["show", "r", "--rollout", str(ids[0][0]), "--root", str(root)]) == 0
        transcript = capsys.readouterr().out
        assert "refused to the agent: 10.0.0.1:80 (not allowed), 1 times" in transcript
        assert "refused to the verifier: 169.254.169.254:80 (not allowed), 1 times" in transcript


def _row(name: str, rescorable: bool, agent: Json, verifier: Json) -> dict[str, Json]:
    return {
        "task_id": name,
        "reward": 1.0,
        "rescorable": rescorable,
        "agent_refusals": agent,
        "verifier_refusals": verifier,
    }
