"""INIT, RUN and EVAL one row at a time, against a sandboxd that writes down what it is asked."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace

import pyarrow as pa
import pytest

from prorl.columns import leased_batch, read_failure, read_ready, read_sandbox
from prorl.envs import get_env
from prorl.envs.noop import NoopEnv
from prorl.errors import GraderError, RolloutError, SandboxError, TaskError
from prorl.limits import Deadline
from prorl.protocols import Env, Sandbox
from prorl.renderer import ChatMLRenderer
from prorl.schema import RAN, READY, SCORED
from prorl.stages.eval import TRIES, EvalOperator
from prorl.stages.init import InitOperator
from prorl.stages.run import RunOperator
from prorl.tokenizer import load_tokenizer
from prorl.types import (
    AttemptKey,
    FailureCode,
    RewardPart,
    RolloutLimits,
    SandboxSpec,
    Score,
    Stage,
    Task,
)  # fmt: skip
from tests.flight.rows import key, lease
from tests.stages.service import RecordingHost, as_host

OWNER = "run/1/1"


@dataclass
class BoxedEnv(NoopEnv):
    """The env that does nothing, in a sandbox; grading does what the test wants."""

    name: str = "boxed"
    grading: list[Exception] = field(default_factory=list)
    artefacts: list[bytes] = field(default_factory=list)
    slow_s: float = 0.0

    def sandbox(self, task: Task, stage: Stage) -> SandboxSpec | None:
        return SandboxSpec()

    async def prepare(self, task: Task, sandbox: Sandbox | None) -> None:
        assert sandbox is not None
        await asyncio.sleep(self.slow_s)

    async def score(self, task: Task, artefact: bytes, sandbox: Sandbox | None, deadline: Deadline) -> Score:
        assert sandbox is not None
        self.artefacts.append(artefact)
        await asyncio.sleep(self.slow_s)
        if self.grading:
            raise self.grading.pop(0)
        return Score(parts=(RewardPart(name="done", value=1.0),))


def row_of(backend: str = "scripted:noop", limits: RolloutLimits | None = None, agent: str = "native") -> pa.RecordBatch:
    return leased_batch([replace(lease(1, limits=limits), backend=backend, agent=agent)])


def operators(env: Env, host: RecordingHost, cuts: set[AttemptKey] | None = None) -> tuple[InitOperator, RunOperator, EvalOperator]:
    is_cut = (cuts if cuts is not None else set()).__contains__
    renderer = ChatMLRenderer(load_tokenizer("bytes"))
    run = RunOperator(as_host(host), lambda _: env, renderer, is_cut=is_cut, progress=lambda *_: None)
    return InitOperator(as_host(host), lambda _: env), run, EvalOperator(as_host(host), lambda _: env, is_cut=is_cut)


async def test_a_rollout_uses_one_sandbox_to_act_and_a_fresh_one_to_be_scored() -> None:
    host, env = RecordingHost(), BoxedEnv()
    init, run, evaluate = operators(env, host)
    ready = await init(row_of())
    assert ready.schema.equals(READY, check_metadata=True)
    acting = read_sandbox(ready).sandbox_id
    assert list(host.live) == [acting]
    ran = await run(ready)
    assert ran.schema.equals(RAN, check_metadata=True)
    assert acting not in host.live
    scored = await evaluate(ran)
    assert scored.schema.equals(SCORED, check_metadata=True)
    assert scored.column("reward")[0].as_py() == 1.0
    assert host.live == {}
    verbs = [verb for verb, _, _ in host.asked]
    assert verbs == ["start", "connect", "reserve", "connect", "stop", "start", "connect", "stop_owner"]
    assert [purpose for verb, _, purpose in host.asked if verb == "start"] == ["run", "eval"]
    assert env.artefacts == [ran.column("artefact")[0].as_py()]
    await run.close()


async def test_without_a_sandbox_sandboxd_is_not_asked() -> None:
    host = RecordingHost()
    init, run, evaluate = operators(get_env("noop"), host)
    row = await evaluate(await run(await init(row_of())))
    assert row.column("reward")[0].as_py() == 1.0
    assert host.asked == []
    assert read_ready(row).prompt[0].content == "What is 1+1?"
    assert run.num_tokens > 0


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
        await real(leased_batch([lease(1, env="mathh")]))
    with pytest.raises(TaskError):
        await real(leased_batch([lease(1, env="math")]))


async def test_what_init_started_is_given_back() -> None:
    host = RecordingHost()
    init, _, _ = operators(BoxedEnv(), host)
    await init(row_of())
    await init.release(row_of())
    await init.release(row_of())
    assert host.live == {}


@pytest.mark.parametrize(
    ("backend", "code"), [("scripted:faulty?error=1", "backend_unavailable"), ("http://127.0.0.1:9", "backend_unavailable")]
)
async def test_a_lost_backend_is_infra_and_leaves_no_sandbox(backend: str, code: str) -> None:
    host = RecordingHost()
    init, run, _ = operators(BoxedEnv(), host)
    ran = await run(await init(row_of(backend)))
    failure = read_failure(ran)
    assert (failure.code, failure.failure_class) == (code, "infra")
    assert host.live == {}
    assert ("stop_owner", OWNER, "") in host.asked
    await run.close()


async def test_a_cut_attempt_keeps_its_turns_and_leaves_no_sandbox() -> None:
    host, cuts = RecordingHost(), set[AttemptKey]()
    init, run, _ = operators(BoxedEnv(), host, cuts)
    work = asyncio.ensure_future(run(await init(row_of("scripted:noop?delay_s=5"))))
    await asyncio.sleep(0.05)
    cuts.add(key(1))
    work.cancel()
    ran = await asyncio.wait_for(work, 2)
    assert ran.column("stop_reason")[0].as_py() == "cancelled"
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
        assert scored.column("scored")[0].as_py() is (code == "")
        assert host.live == {}


@pytest.mark.parametrize("error", [GraderError(FailureCode.GRADER_ERROR, "crashed"), ZeroDivisionError("in a grader")])
async def test_a_grader_that_fails_masks_and_never_scores_zero(error: Exception) -> None:
    init, run, evaluate = operators(BoxedEnv(grading=[error]), RecordingHost())
    scored = await evaluate(await run(await init(row_of())))
    assert read_failure(scored, "eval_").code is FailureCode.GRADER_ERROR
    assert scored.column("scored")[0].as_py() is False


async def test_eval_is_idempotent() -> None:
    init, run, evaluate = operators(BoxedEnv(), RecordingHost())
    ran = await run(await init(row_of()))
    first, second = await evaluate(ran), await evaluate(ran)
    assert first.drop_columns(["eval_s"]).equals(second.drop_columns(["eval_s"]))


async def test_eval_ends_by_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prorl.stages.eval.GRACE_S", 0.0)
    host = RecordingHost()
    env = BoxedEnv()
    init, run, evaluate = operators(env, host)
    ran = await run(await init(row_of(limits=RolloutLimits(eval_s=0.05))))
    env.slow_s = 5
    scored = await asyncio.wait_for(evaluate(ran), 2)
    assert read_failure(scored, "eval_").code is FailureCode.EVAL_FAILED
    assert host.live == {}


async def test_rows_that_failed_in_run_pass_unscored_and_untouched() -> None:
    env = BoxedEnv()
    init, run, evaluate = operators(env, RecordingHost())
    ran = await run(await init(row_of("scripted:faulty?error=1")))
    scored = await evaluate(ran)
    assert scored.column("scored")[0].as_py() is False
    assert scored.select(RAN.names).equals(ran)
    assert env.artefacts == []
