"""INIT, RUN and EVAL one row at a time, against a sandboxd that writes down what it is asked."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

import pytest

from prorl.backends import open_backend
from prorl.backends.server import TokenServer
from prorl.config.renderer import RendererSpec
from prorl.envs import get_env
from prorl.envs.noop import NoopEnv
from prorl.errors import GraderError, PromptTooLongError, RolloutError, SandboxError, TaskError
from prorl.helper.pool import close
from prorl.limits import Deadline
from prorl.protocols import Env, Operator, Sandbox
from prorl.renderer import ChatMLRenderer
from prorl.schema import RAN, READY, SCORED
from prorl.schema.columns import read_failure, read_ready, read_sandbox
from prorl.schema.rows import Row
from prorl.stages.eval import TRIES, EvalOperator
from prorl.stages.init import InitOperator
from prorl.stages.run import RunOperator
from prorl.tokenizer import load_tokenizer
from prorl.types import (
    AttemptKey,
    FailureClass,
    FailureCode,
    RewardPart,
    RolloutLimits,
    SandboxSpec,
    Score,
    Stage,
    Task,
)
from tests.edge_rows import grown, leased_batch, only
from tests.flight.work_rows import key, lease
from tests.stages.recording_host import RecordingHost, as_host
from tests.waiting import until

OWNER = "run/1/1"


OperatorT = TypeVar("OperatorT", bound=Operator)


@dataclass
class BoxedEnv(NoopEnv):
    """The env that does nothing, in a sandbox; grading does what the test wants."""

    name: str = "boxed"
    grading: list[Exception] = field(default_factory=list)
    artifacts: list[bytes] = field(default_factory=list)
    slow_s: float = 0.0
    reward: float = 1.0

    def sandbox(self, task: Task, stage: Stage) -> SandboxSpec | None:
        return SandboxSpec()

    async def prepare(self, task: Task, sandbox: Sandbox | None) -> None:
        assert sandbox is not None
        await asyncio.sleep(self.slow_s)

    async def score(
        self, task: Task, artifact: bytes, sandbox: Sandbox | None, deadline: Deadline
    ) -> Score:
        assert sandbox is not None
        self.artifacts.append(artifact)
        await asyncio.sleep(self.slow_s)
        if self.grading:
            raise self.grading.pop(0)
        return Score(parts=(RewardPart(name="done", value=self.reward),))


def row_of(
    backend: str = "scripted:noop", limits: RolloutLimits | None = None, agent: str = "native"
) -> Row:
    return only(leased_batch([replace(lease(1, limits=limits), backend=backend, agent=agent)]))


BYTES = RendererSpec(model="bytes").to_json()


@dataclass
class Grown(Generic[OperatorT]):
    """An operator that answers with the row of the next edge."""

    operator: OperatorT

    async def __call__(self, row: Row) -> Row:
        return only(grown(row.as_batch, await self.operator(row)))


def operators(
    env: Env, host: RecordingHost, cancelled: set[AttemptKey] | None = None
) -> tuple[Grown[InitOperator], Grown[RunOperator], Grown[EvalOperator]]:
    is_cancelled = (cancelled if cancelled is not None else set()).__contains__
    renderer = ChatMLRenderer(load_tokenizer("bytes"))
    run = RunOperator(
        as_host(host),
        lambda _: env,
        lambda spec: asyncio.sleep(0, renderer),
        is_cancelled=is_cancelled,
        emit=lambda *_, **__: None,
    )
    return (
        Grown(InitOperator(as_host(host), lambda _: env)),
        Grown(run),
        Grown(
            EvalOperator(
                as_host(host), lambda _: env, is_cancelled=is_cancelled, retry_delays_s=(0, 0)
            )
        ),
    )


async def test_a_rollout_acts_in_a_sandbox_and_is_scored_in_a_fresh_sandbox() -> None:
    host, env = RecordingHost(), BoxedEnv()
    init, run, evaluate = operators(env, host)
    ready = await init(row_of())
    assert ready.batch.schema.equals(READY, check_metadata=True)
    acting = read_sandbox(ready).sandbox_id
    assert list(host.live) == [acting]
    ran = await run(ready)
    assert ran.batch.schema.equals(RAN, check_metadata=True)
    assert acting not in host.live
    scored = await evaluate(ran)
    assert scored.batch.schema.equals(SCORED, check_metadata=True)
    assert scored.value("reward") == 1.0
    assert host.live == {}
    requests = [(verb, purpose) for verb, _, purpose in host.requests if purpose]
    assert requests == [("start", "run"), ("reserve", "eval"), ("start", "eval")]
    assert env.artifacts == [ran.value("artifact")]
    await run.operator.close()


async def test_without_a_sandbox_sandboxd_gets_no_request() -> None:
    host = RecordingHost()
    init, run, evaluate = operators(get_env("noop"), host)
    row = await evaluate(await run(await init(row_of())))
    assert row.value("reward") == 1.0
    assert host.requests == []
    assert read_ready(row).prompt[0].content == "What is 1+1?"
    assert run.operator.num_tokens > 0


async def test_init_gives_its_failures_their_codes() -> None:
    def refuse(verb: str, owner: str) -> None:
        raise SandboxError(FailureCode.SANDBOX_START, "no room")

    host = RecordingHost(trouble=refuse)
    init, _, _ = operators(BoxedEnv(), host)
    with pytest.raises(SandboxError, match="no room"):
        await init(row_of())
    slow, _, _ = operators(BoxedEnv(slow_s=5), RecordingHost())
    with pytest.raises(SandboxError, match=r"init_s = 0\.05"):
        await slow(row_of(limits=RolloutLimits(init_s=0.05)))
    real = InitOperator(as_host(RecordingHost()), get_env)
    with pytest.raises(RolloutError, match="unknown_env"):
        await real(only(leased_batch([lease(1, env="mathh")])))
    with pytest.raises(TaskError):
        await real(only(leased_batch([lease(1, env="math")])))


async def test_a_prompt_that_does_not_fit_starts_no_sandbox() -> None:
    host = RecordingHost()
    init, _, _ = operators(BoxedEnv(), host)
    row = only(
        leased_batch([replace(lease(1, limits=RolloutLimits(max_tokens=2)), renderer=BYTES)])
    )
    with pytest.raises(
        PromptTooLongError, match=r"a prompt of \d+ tokens; expected fewer than limits.max"
    ):
        await init(row)
    assert host.requests == []
    close()


async def test_a_sandbox_that_init_started_is_released() -> None:
    host = RecordingHost()
    init, _, _ = operators(BoxedEnv(), host)
    await init(row_of())
    await init.operator.release(row_of())
    await init.operator.release(row_of())
    assert host.live == {}


async def test_a_backend_lost_in_a_turn_is_infra_and_leaves_no_sandbox() -> None:
    host = RecordingHost()
    init, run, _ = operators(BoxedEnv(), host)
    failure = read_failure(await run(await init(row_of("scripted:faulty?error=1"))))
    assert (failure.code, failure.failure_class) == ("backend_unavailable", "infra")
    assert host.live == {}
    assert ("stop_owner", OWNER, "") in host.requests
    await run.operator.close()


async def test_a_backend_out_of_reach_or_with_raw_logprobs_gets_no_rollout_and_no_sandbox() -> None:
    tokenizer = load_tokenizer("bytes")
    renderer = ChatMLRenderer(tokenizer)
    async with TokenServer(
        open_backend("scripted:random?raw=1", renderer, get_env), tokenizer, model="raw"
    ) as server:
        for url, code in (
            ("http://127.0.0.1:9", "backend_unavailable"),
            (server.url, "backend_protocol"),
        ):
            host = RecordingHost()
            init, run, _ = operators(BoxedEnv(), host)
            # an answer to one attempt is none to the next: the server may be mended by then
            for _ in range(2):
                failure = read_failure(await run(await init(row_of(url))))
                assert failure.code == code
                assert host.live == {}
            await run.operator.close()


async def test_a_cut_attempt_keeps_its_turns_and_leaves_no_sandbox() -> None:
    host, cancelled = RecordingHost(), set[AttemptKey]()
    init, run, _ = operators(BoxedEnv(), host, cancelled)
    work = asyncio.ensure_future(run(await init(row_of("scripted:noop?delay_s=60"))))
    await until(lambda: [verb for verb, _, _ in host.requests].count("connect") >= 2)
    cancelled.add(key(1))
    work.cancel()
    ran = await asyncio.wait_for(work, 60)
    assert ran.value("stop_reason") == "cancelled"
    assert read_failure(ran).code is FailureCode.CANCELLED
    assert host.live == {}


async def test_run_stops_its_sandbox_when_it_cannot_begin() -> None:
    host = RecordingHost()
    init, run, _ = operators(BoxedEnv(), host)
    ready = await init(row_of(agent="nosuch"))
    with pytest.raises(ValueError, match="unknown agent"):
        await run(ready)
    assert host.live == {}


async def test_eval_tries_again_after_sandbox_trouble_and_gives_up_as_infra() -> None:
    broken = SandboxError(FailureCode.SANDBOX_LOST, "gone")
    for tries, code in ((TRIES - 1, ""), (TRIES, "eval_failed")):
        host = RecordingHost()
        init, run, evaluate = operators(BoxedEnv(grading=[broken] * tries), host)
        scored = await evaluate(await run(await init(row_of())))
        assert read_failure(scored, "eval_").code == code
        assert scored.value("scored") is (code == "")
        assert host.live == {}


@dataclass
class OversizeEnv(BoxedEnv):
    """Its artifact never fits."""

    async def pack(self, task: Task, sandbox: Sandbox, max_bytes: int) -> bytes | None:
        assert max_bytes == 64 << 20
        return None

    async def score_in_place(
        self, task: Task, sandbox: Sandbox, fresh: Sandbox, deadline: Deadline
    ) -> Score:
        assert sandbox is not fresh
        return await self.score(task, b"", sandbox, deadline)


@pytest.mark.parametrize(
    ("problem", "failures", "code"),
    [
        (GraderError(FailureCode.GRADER_ERROR, "away"), 1, ""),
        (GraderError(FailureCode.GRADER_ERROR, "away"), 9, "eval_failed"),
        (SandboxError(FailureCode.SANDBOX_LOST, "gone"), 1, ""),
        (SandboxError(FailureCode.SANDBOX_LOST, "gone"), 9, "eval_failed"),
    ],
)
async def test_what_does_not_cross_is_scored_in_the_sandbox_that_run_leaves(
    problem: Exception, failures: int, code: str
) -> None:
    """Again while that is there; then a new attempt begins, for nothing can be graded later."""
    host = RecordingHost()
    init, run, evaluate = operators(OversizeEnv(grading=[problem] * failures), host)
    ready = await init(row_of())
    ran = await run(ready)
    assert list(host.live) == [read_sandbox(ready).sandbox_id]
    assert (ran.value("rescorable"), ran.value("artifact")) == (False, b"")
    scored = await evaluate(ran)
    assert (scored.value("scored"), read_failure(scored, "eval_").code) == (not code, code)
    assert read_failure(scored, "eval_").failure_class in (FailureClass.NONE, FailureClass.INFRA)
    assert host.live == {}
    await run.operator.close()


@pytest.mark.parametrize("failures", [1, 2, 3])
@pytest.mark.parametrize(
    "error",
    [GraderError(FailureCode.GRADER_ERROR, "away", "Traceback"), ZeroDivisionError("in it")],
)
async def test_eval_alone_asks_a_failing_grader_again_with_the_same_artifact(
    error: Exception, failures: int
) -> None:
    """A grader that fails for good masks the rollout, and never scores it 0."""
    host, env = RecordingHost(), BoxedEnv(grading=[error] * failures)
    init, run, evaluate = operators(env, host)
    ran = await run(await init(row_of()))
    added = await evaluate.operator(ran)
    assert added.is_committed
    scored = only(grown(ran.as_batch, added))
    assert len(env.artifacts) == min(failures + 1, 3)
    assert set(env.artifacts) == {ran.value("artifact")}
    assert scored.value("scored") is (failures < 3)
    failure = read_failure(scored, "eval_")
    assert failure.code is (FailureCode.NONE if failures < 3 else FailureCode.GRADER_ERROR)
    if failures == 3 and isinstance(error, GraderError):
        assert (failure.message, scored.value("grader_log")) == ("away", "Traceback")
    assert host.live == {}


@pytest.mark.parametrize("reward", [float("nan"), float("-inf"), 1e308, 4e38])
async def test_a_reward_that_no_float32_holds_is_its_envs_fault(reward: float) -> None:
    """The store would refuse the row, as a failure of ours."""
    init, run, evaluate = operators(BoxedEnv(reward=reward), RecordingHost())
    failure = read_failure(await evaluate(await run(await init(row_of()))), "eval_")
    assert failure.code is FailureCode.BAD_TASK
    assert f"{reward:g}" in failure.message


async def test_eval_ends_by_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prorl.stages.eval.GRACE_S", 0.0)
    host = RecordingHost()
    env = BoxedEnv()
    init, run, evaluate = operators(env, host)
    ran = await run(await init(row_of(limits=RolloutLimits(eval_s=0.5))))
    env.slow_s = 60
    scored = await asyncio.wait_for(evaluate(ran), 30)
    failure = read_failure(scored, "eval_")
    assert (failure.code, len(env.artifacts)) == (FailureCode.GRADER_ERROR, 2)
    assert "not scored within eval_s" in failure.message
    assert host.live == {}


async def test_rows_that_failed_in_run_pass_unscored_and_untouched() -> None:
    env = BoxedEnv()
    init, run, evaluate = operators(env, RecordingHost())
    ran = await run(await init(row_of("scripted:faulty?error=1")))
    scored = await evaluate(ran)
    assert scored.value("scored") is False
    assert scored.batch.select(RAN.names).equals(ran.batch)
    assert env.artifacts == []
