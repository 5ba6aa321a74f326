"""Guests from elsewhere: they lease an attempt over HTTP, and whatever they do then has an end."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest

import prorl
from prorl.agents import get_agent, guest_broker
from prorl.agents.guest_broker import GuestBroker
from prorl.agents.guest_broker_server import serving
from prorl.envs import get_env
from prorl.limits import Deadline
from prorl.net.bearer import Keys
from prorl.net.join import AUTHORITY_FILE, SERVICE_FILE, prepare
from prorl.net.tls import LiveCredentials
from prorl.testing import Replies, Reply, make_task
from prorl.types import AttemptKey, FailureCode, Json, RolloutLimits, Trajectory
from tests.agents.test_guest import ASK, GRADE
from tests.agents.test_native import context

KEYS = Keys("owner", "k" * 64)
PULL = Path(prorl.__file__).parent / "guests" / "pull.py"
TASK = make_task("guest", "Half of 48?", guest="lake", answer="24")


@dataclass
class Open:
    guest_broker: GuestBroker
    url: str
    http: aiohttp.ClientSession

    def attempt(self, *replies: Reply, queue_s: float = 60.0) -> asyncio.Task[Trajectory]:
        self.context = context(
            Replies(*replies), get_env("guest"), RolloutLimits(max_turns=2, queue_s=queue_s)
        )
        self.context.task, self.context.guest_broker = TASK, self.guest_broker
        return asyncio.ensure_future(get_agent("guest").run(self.context))

    async def post(self, path: str, bearer: str, body: Json = None) -> tuple[int, Json]:
        head = {"authorization": f"Bearer {bearer}"}
        async with self.http.post(self.url + path, json=body or {}, headers=head) as answer:
            return answer.status, await answer.json()

    async def lease(self, bearer: str = "owner", **body: Json) -> Json:
        status, leases = await self.post("/v1/guests/lake/lease", bearer, body)
        assert status == 200, leases
        return leases[0]

    async def ask(self, lease: Json, key: str = "") -> tuple[int, Json]:
        body = {"model": "m", "messages": [{"role": "user", "content": lease["task"]["prompt"]}]}
        path = lease["base_url"].removeprefix(self.url) + "/chat/completions"
        return await self.post(path, key or lease["key"], body)

    async def say(self, lease: Json, how: str, **body: Json) -> int:
        return (await self.post(f"/v1/guests/leases/{lease['lease']}/{how}", lease["key"], body))[0]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


@pytest.fixture
async def at() -> AsyncIterator[Open]:
    async with opened() as made:
        yield made


@asynccontextmanager
async def opened(
    waits: Callable[[AttemptKey, bool], None] = lambda key, waits: None,
) -> AsyncIterator[Open]:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    made = GuestBroker(("127.0.0.1", port, url), KEYS, "secret", waits=waits)
    async with serving(made), aiohttp.ClientSession() as http:
        yield Open(made, url, http)


async def scored(trajectory: Trajectory) -> float:
    assert trajectory.failure.failure_class.trains, trajectory.failure
    score = await get_env("guest").score(TASK, trajectory.artifact, None, Deadline(9))
    return score.reward


@pytest.mark.parametrize(("reply", "reward"), [("24", 1.0), ("42", 0.0)])
async def test_a_right_answer_earns_1_and_a_wrong_answer_0(
    at: Open, reply: str, reward: float
) -> None:
    running = at.attempt(reply)
    lease = await at.lease()
    assert lease["task"]["data"] == {"answer": "24"}
    status, answer = await at.ask(lease)
    content = answer["choices"][0]["message"]["content"]
    assert status == 200
    assert await at.say(lease, "done", reward=float(content == "24"), log="judged") == 200
    trajectory = await running
    assert (await scored(trajectory), trajectory.messages[-1].content) == (reward, "judged")
    assert len(trajectory.sequences) == len(trajectory.turns) == 1


@pytest.mark.parametrize(("code", "failure"), [("task", "bad_task"), ("infra", "eval_failed")])
async def test_its_own_failure_is_nobodys_reward(at: Open, code: str, failure: str) -> None:
    running = at.attempt("24")
    lease = await at.lease()
    await at.ask(lease)
    assert await at.say(lease, "failed", code=code, message="broken") == 200
    with pytest.raises(prorl.ProrlError, match="broken") as caught:
        await scored(await running)
    assert caught.value.code == failure  # type: ignore[attr-defined]


async def test_a_repeated_outcome_is_idempotent_and_a_different_outcome_is_refused(
    at: Open,
) -> None:
    running = at.attempt("24")
    lease = await at.lease()
    await at.ask(lease)
    statuses = [await at.say(lease, "done", reward=r) for r in (1, 1, 0)]
    assert statuses == [200, 200, 409]
    assert await scored(await running) == 1.0
    assert [await at.say(lease, "done", reward=1), await at.say(lease, "alive")] == [200, 410]


async def test_after_a_cancel_all_of_it_is_over(at: Open) -> None:
    running = at.attempt(None)
    lease = await at.lease()
    asking = asyncio.ensure_future(at.ask(lease))
    await at.context.backend.waiting.wait()  # type: ignore[attr-defined]
    at.context.cancelled = lambda: True
    running.cancel()
    assert (await running).failure.code is FailureCode.CANCELLED
    assert (await asking)[0] == 503
    assert await at.say(lease, "done", reward=1) == 410
    assert (await at.ask(lease))[0] == 410


async def test_the_next_attempt_of_a_silent_guest_goes_to_another(
    at: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guest_broker, "SILENT_S", 0.3)
    running = at.attempt("24")
    first = await at.lease()
    await at.ask(first)
    failure = (await running).failure
    assert (failure.code, failure.failure_class.trains) == (FailureCode.EVAL_FAILED, False)
    running = at.attempt("24")
    second = await at.lease()
    await at.ask(second)
    assert await at.say(first, "done", reward=1) == 410
    assert await at.say(second, "done", reward=0.5) == 200
    assert await scored(await running) == 0.5


async def test_heartbeats_keep_a_lease(at: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also a call that the policy takes long to answer."""
    monkeypatch.setattr(guest_broker, "SILENT_S", 1.5)
    running = at.attempt(None)
    lease = await at.lease()
    asking = asyncio.ensure_future(at.ask(lease))
    await at.context.backend.waiting.wait()  # type: ignore[attr-defined]
    assert not (await asyncio.wait({running}, timeout=2.0))[0]
    asking.cancel()
    for _ in range(4):
        assert await at.say(lease, "alive") == 200
        await asyncio.wait({running}, timeout=0.5)
    assert await at.say(lease, "done", reward=1) == 200
    assert "left a reward of 1" in (await running).failure.message


async def test_wrong_keys_and_roles_are_refused(at: Open) -> None:
    running = at.attempt()
    for role, status in (("guest", 200), ("trainer", 403), ("viewer", 403)):
        token = KEYS.issue(role, runs=("another",))[1]
        reply = await at.post("/v1/guests/lake/lease", token, {"wait_s": 0.01})
        assert reply[0] == status
        assert reply[1] == [] or status != 200
    assert (await at.post("/v1/guests/lake/lease", "wrong"))[0] == 401
    assert (await at.post("/v1/guests/other/lease", "owner", {"wait_s": 0.01}))[1] == []
    lease = await at.lease(KEYS.issue("guest", runs=("run",))[1])
    other = at.guest_broker.key("other")
    for key in ("wrong", "wrong.key", "owner", other):
        assert (await at.ask(lease, key))[0] == (410 if key == other else 401)
        done = await at.post(f"/v1/guests/leases/{lease['lease']}/done", key, {"reward": 1})
        assert done[0] == 401
    assert await at.say(lease, "done", reward=[0] * 50_000) == 400
    assert await at.say(lease, "done", reward=1) == 200
    await running


async def test_a_log_is_cut_and_of_an_outcome_its_digest_is_kept(at: Open) -> None:
    running = at.attempt("24")
    lease = await at.lease()
    await at.ask(lease)
    log = "begin " + "x" * 900_000 + " end"
    assert [await at.say(lease, "done", reward=1, log=log) for _ in range(2)] == [200, 200]
    content = (await running).messages[-1].content
    assert len(content) <= guest_broker.MAX_LOG
    assert content.endswith(" end")
    assert sum(map(len, at.guest_broker._outcome_digests.values())) <= 16


async def test_a_row_that_waits_for_a_guest_has_no_slot_and_says_whom_it_waits_for() -> None:
    waiting_flags: list[bool] = []
    async with opened(lambda key, waits: waiting_flags.append(waits)) as at:
        first, second = at.attempt(queue_s=0.5), at.attempt()
        await asyncio.sleep(0)
        while at.guest_broker.waits_for != {"run": {"lake": 2}}:
            await asyncio.sleep(0.01)
        assert waiting_flags == [True, True]
        assert (await first).failure.code is FailureCode.STAGE_ERROR
        assert await at.say(await at.lease(), "done", reward=1) == 200
        await second
        assert (waiting_flags[2:], at.guest_broker.waits_for) == ([False, False], {})


async def test_waiting_for_a_guest_costs_nothing_and_ends(at: Open) -> None:
    running = at.attempt(queue_s=0.2)
    at.context.deadline = Deadline(0.1)
    failure = (await running).failure
    assert (failure.code, failure.message) == (
        FailureCode.STAGE_ERROR,
        "no guest 'lake' came for 0.2 s",
    )


async def test_the_same_script_is_a_guest_locally_and_remotely(at: Open, tmp_path: Path) -> None:
    """`pull.py` leases, and starts what RUN would start."""
    script = tmp_path / "half.py"
    script.write_text(ASK + GRADE)
    argv = [sys.executable, "-S", PULL, at.url, "lake", "2", "--", sys.executable, script]
    env = {"PRORL_TOKEN": KEYS.issue("guest")[1], "PATH": os.environ["PATH"]}
    process = await asyncio.create_subprocess_exec(*map(str, argv), env=env)
    trajectories = await asyncio.gather(*(at.attempt(answer) for answer in ("24", "42", "24")))
    assert [await scored(each) for each in trajectories] == [1.0, 0.0, 1.0]
    process.terminate()
    assert await process.wait() == 0


async def test_from_another_host_over_tls_that_plain_clients_believe(tmp_path: Path) -> None:
    """The authority is all that they need, also those that verify strictly (Python 3.13's default);
    their token says who they are.
    """
    pytest.importorskip("cryptography", reason="connections between hosts need the extra `tls`")
    prepare(tmp_path, "https://127.0.0.1:1", KEYS)
    credentials = LiveCredentials(tmp_path / "tls" / SERVICE_FILE)
    url = f"https://127.0.0.1:{(port := free_port())}"
    ask = (
        "import ssl, urllib.request as u\n"
        "strict = ssl.create_default_context()\n"
        "strict.verify_flags |= ssl.VERIFY_X509_STRICT\n"
        f"r = u.Request('{url}/v1/guests/x/lease', b'{{\"wait_s\": 0}}',"
        " {'authorization': 'Bearer owner'})\n"
        "print(u.urlopen(r, context=strict).read().decode())"
    )
    async with serving(GuestBroker(("127.0.0.1", port, url), KEYS, "secret", credentials)):
        for believed, expected in (
            (AUTHORITY_FILE, b"[]"),
            ("nothing", b"CERTIFICATE_VERIFY_FAILED"),
        ):
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", ask),
                env={"SSL_CERT_FILE": str(tmp_path / "tls" / believed)},
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
            )
            assert expected in (await process.communicate())[0]
