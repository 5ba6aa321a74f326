"""An agent in a sandbox of another provider: a guest on one host starts it on another one, and it
reaches the policy from there over TLS, with the key of its attempt.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from prorl.storage.read.catalog import StoredRun
from prorl.types import Json
from tests.agents.test_guest_broker import PULL
from tests.agents.test_harbor_guest import AGENTS, BIN, TOML, rows
from tests.cluster.cluster_service import PRORL, running_cluster
from tests.cluster.namespace_hosts import Hosts
from tests.harbor_folders import make_folder
from tests.integration.run_checks import rows as query
from tests.waiting import wait_until

PORT = 7800
SUBMIT = """
import json, sys, prorl
from prorl.types import Task
client = prorl.connect(sys.argv[1])
client.create_run(run_id="far", limits={"max_turns": 3})
data = {"guest": "trial", **json.loads(sys.argv[2])}
task = Task(task_id="trial/1", env="guest", prompt="Say anything.", data=data)
client.submit("far", [task], n=2, key="k", last=True)
"""
AGENT = """
import json, os, ssl, sys, urllib.error, urllib.request
def ask(url, key):
    body = {"model": "policy", "messages": [{"role": "user", "content": "What now?"}]}
    head = {"authorization": "Bearer " + key, "content-type": "application/json"}
    request = urllib.request.Request(url + "/chat/completions", json.dumps(body).encode(), head)
    try:
        reply = json.load(urllib.request.urlopen(request, timeout=60))
        return 200, reply["choices"][0]["message"]["content"]
    except urllib.error.HTTPError as error:
        return error.code, ""
    except OSError as error:
        return 0, str(error)
"""
"""On the sandbox's host: Python alone, as any program of any provider's image."""
PLAY = "print(json.dumps(ask(os.environ['OPENAI_BASE_URL'], os.environ['OPENAI_API_KEY'])))"
GUEST = """
import json, os, subprocess, sys
names = ("OPENAI_BASE_URL", "OPENAI_API_KEY", "SSL_CERT_FILE")
words = [f"{name}={os.environ[name]}" for name in names]
program = sys.argv[1:-1] + ["env", "-i", *words, sys.executable, "-S", "-c", sys.argv[-1]]
status, reply = json.loads(subprocess.check_output(program))
with open("reward.json", "w") as file:
    json.dump({"reward": float(status == 200 and bool(reply))}, file)
"""
"""As a trial of Harbor: it starts the agent in the environment, and judges."""
RECORD = """
import json, os, sys
with open(f"{sys.argv[1]}/{os.getpid()}.json", "w") as file:
    json.dump(dict(os.environ), file)
os.execvp(sys.argv[2], sys.argv[2:])
"""
"""Begins a guest, and keeps what its attempt was given."""


def ask_from(on: Hosts, host: int, url: str, key: str, authority: Path | None) -> tuple[int, str]:
    """Returns status and reply of a call from a host; status 0 where it has no connection."""
    words = [f"SSL_CERT_FILE={authority}"] if authority else []
    code = f"{AGENT}print(json.dumps(ask({url!r}, {key!r})))"
    argv = on.argv(host, "env", "-i", *words, sys.executable, "-S", "-c", code)
    status, reply = json.loads(subprocess.check_output(argv))
    return status, reply


def script(on: Hosts, folder: Path, authority: Path) -> tuple[Json, list[str]]:
    """Returns the data of its row, and the guest's argv."""
    return {}, [sys.executable, "-c", GUEST, *on.argv(3), AGENT + PLAY]


def trial(on: Hosts, folder: Path, authority: Path) -> tuple[Json, list[str]]:
    """The same of a real trial of Harbor, whose environment is on host 3."""
    make_folder(folder / "task", **{"task.toml": TOML})
    agent = {**AGENTS["mini-swe-agent"], "env": {"SSL_CERT_FILE": str(authority)}}
    more = {"ENTER": shlex.join(on.argv(3)), "SHARED": str(authority.parent)}
    data = rows(folder, agent, **more)
    return data, [word.replace("{guests}", str(PULL.parent)) for word in data.pop("argv")]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("guest", "reward", "calls"),
    [
        (script, 1.0, 1),
        pytest.param(
            trial,
            0.0,  # what it is told is no tool call, until its turns end
            3,
            marks=[pytest.mark.slow, pytest.mark.skipif(not BIN.exists(), reason="no Harbor")],
        ),
    ],
)
def test_an_agent_on_another_host_than_its_guest_reaches_the_policy(
    tmp_path: Path,
    guest: Callable[[Hosts, Path, Path], tuple[Json, list[str]]],
    reward: float,
    calls: int,
) -> None:
    layout = (f"service.guests={PORT}", "service.workers=1")
    attempts = tmp_path / "attempts"
    attempts.mkdir()
    with running_cluster(
        tmp_path, num_nodes=0, num_hosts=3, layout=layout, turn_s=0, policy="noop"
    ) as w:
        address, authority = f"https://{w.hosts.address(1)}:{PORT}", w.root / "tls" / "trust.pem"
        data, argv = guest(w.hosts, tmp_path, authority)
        submit = (sys.executable, "-c", SUBMIT, str(w.root), json.dumps(data))
        subprocess.run(w.hosts.argv(1, *submit), check=True)
        issue = (*PRORL, "token", "new", "--role", "guest", "--run", "far", "--root", str(w.root))
        token = subprocess.check_output(w.hosts.argv(1, *issue), text=True).strip()
        env = [f"PRORL_TOKEN={token}", f"SSL_CERT_FILE={authority}"]
        record = [sys.executable, "-c", RECORD, str(attempts)]
        pull = [sys.executable, "-S", str(PULL), address, "trial", "2", "--", *record, *argv]
        puller = subprocess.Popen(w.hosts.argv(2, "env", *env, *pull))
        try:
            w.num = 2
            w.complete()
        finally:
            puller.terminate()
            puller.wait()
        first, second = (json.loads(path.read_text()) for path in attempts.glob("*.json"))
        for attempt in (first, second):
            assert attempt["OPENAI_BASE_URL"].startswith(address)
        assert first["OPENAI_API_KEY"] != second["OPENAI_API_KEY"]
        url, key = first["OPENAI_BASE_URL"], first["OPENAI_API_KEY"]
        assert ask_from(w.hosts, 3, url, key, authority) == (410, ""), "its attempt is over"
        assert ask_from(w.hosts, 3, url, "guess.work", authority) == (401, "")
        assert "CERTIFICATE_VERIFY_FAILED" in ask_from(w.hosts, 3, url, key, None)[1]
        stored = StoredRun(w.root / "far")
        listing = "select status, attempt, reward, rendered_calls from rollouts"
        expected = {"status": "completed", "attempt": 1, "reward": reward, "rendered_calls": calls}
        assert query(stored, listing) == [expected, expected]
        w.service.terminate()
        w.service.wait(60)
        wait_until(lambda: not w.hosts.pids(), "nothing is left", 30)
