"""The whole life of a run whose directory is in an object store that fails as real ones do: `prorl
run` in processes of its own, SIGKILL at chosen puts, resumed to its end; then every command that
reads or tidies. What is stored equals a run of the same seed on a disk that nothing happened to.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pyarrow as pa
import pytest

import prorl
from prorl.cli.app import dispatch
from prorl.linux.procfs import descendants, start_ticks
from prorl.schema import SEQUENCES, TABLES
from prorl.schema.rows import row_hashes
from prorl.storage.files.layout import RunDir
from prorl.storage.read.catalog import StoredRun
from prorl.storage.serve.replay import stored_index
from tests.integration.run_checks import check_complete, rows
from tests.storage.compactable_run import replayed
from tests.storage.s3_server import FaultyS3, Strike
from tests.waiting import wait_until

pytestmark = [pytest.mark.faults, pytest.mark.timeout(900)]

GROUPS, N = 24, 4
STORM = 0.02
RESUME = ("--resume", "r")
STRIKES: tuple[tuple[str, int, bool], ...] = (
    ("/r/sequences/part-", 2, False),
    ("/r/commits/", 2, True),
    ("/r/commits/", 1, False),
    ("/r/rollouts/pack-", 1, True),
    ("/r/commits/0000000001-", 1, False),
    ("/r/commits/0000000001-", 1, True),
)
"""At which put SIGKILL comes, and whether the server keeps what the put brought."""

DETERMINED = {
    "sequences": "sequence_id, rollout_id, group_id, sample_index, reward, token_ids, logprobs,"
    " span_end, span_kind, span_version, span_turn, span_temperature",
    "rollouts": "rollout_id, group_id, sample_index, rollout_key, task_id, data_source, env, agent,"
    " status, valid, failure_class, failure_code, stop_reason, reward, reward_parts,"
    " num_sequences, num_turns, num_tokens, num_sampled, num_trained, num_tool_calls,"
    " min_version, max_version",
    "turns": "rollout_id, turn, segment, prompt_tokens, completion_tokens, finish_reason,"
    " temperature, policy_version, tool_calls",
    "messages": "rollout_id, index, role, content, tool_calls, turn",
    "groups": "group_id, event, kept, reason, num_members, num_valid, mean_reward, min_version",
    "tasks": "group_id, task_id, data_source, env, n, task, sampling, extra",
}
"""Columns that follow from tasks and seed alone: no clock, no attempt, no order among groups."""


def determined(where: str | Path) -> dict[str, list[str]]:
    """Hashes of every row of every table, as far as the seed determines it."""
    stored = StoredRun(where)
    return {
        table: sorted(
            digest
            for batch in stored.sql(f"select {columns} from {table}").combine_chunks().to_batches()
            for digest in row_hashes(batch)
        )
        for table, columns in DETERMINED.items()
    }


Start = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def start() -> Iterator[Start]:
    """`prorl run` as people start it."""
    with ExitStack() as started:

        def start(root: str, *words: str) -> subprocess.Popen[bytes]:
            argv = [sys.executable, "-m", "prorl.cli", "run", "--root", root, "--quiet", *words]
            process = started.enter_context(
                subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
            )
            started.callback(process.kill)
            return process

        yield start


def fresh(sandbox_kind: str) -> list[str]:
    """The words of the run's first start."""
    tasks = [
        {
            "task_id": f"sum/{i}",
            "env": "math",
            "prompt": f"What is {i} + 7?",
            "data": {"answer": str(i + 7), "solution": f"<<{i}+7={i + 7}>>\n#### {i + 7}"},
        }
        for i in range(GROUPS)
    ]
    Path("tasks.jsonl").write_text("\n".join(map(json.dumps, tasks)))
    settings = (
        f"service.sandbox.kind={sandbox_kind}",
        "service.run.slots=4",
        "service.store.flush_s=0.1",
        "service.store.compact_every_commits=8",
        "service.store.keep_replaced_s=1",
        "run.limits.max_attempts=40",
        "run.limits.max_worker_losses=40",
    )
    words = ["--tasks", "tasks.jsonl", "-n", str(N), "--name", "r", "--filter", "dapo"]
    words += ["--policy", "scripted:flaky?delay_s=0.3", "--seed", "5"]
    return words + [word for setting in settings for word in ("--set", setting)]


def served(batch: pa.RecordBatch) -> list[str]:
    """Hashes of what a replay serves, without what is computed anew (advantages)."""
    return row_hashes(batch.select(SEQUENCES.names))


def streamed(where: str) -> list[str]:
    """Hashes of the rows that a trainer gets from `prorl replay`, in order."""
    argv = [sys.executable, "-m", "prorl.cli", "replay", where, "--json"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        endpoint = json.loads("".join(iter(process.stdout.readline, "}\n")) + "}")
        try:
            with prorl.connect(endpoint["location"], endpoint["token"]) as client:
                return [row for batch in client.stream("r") for row in served(batch.arrow)]
        finally:
            process.terminate()
            assert process.wait(30) == 0


def struck(
    process: subprocess.Popen[bytes], faults: FaultyS3, path: str, at: int, kept: bool
) -> None:
    """Kill all of a run at that put."""
    ticks: dict[int, int | None] = {}

    def kill() -> None:
        ticks.update({pid: start_ticks(pid) for pid in descendants(process.pid)})
        process.kill()

    faults.strike = Strike(kill, path, at, kept)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == -signal.SIGKILL, f"it ended before {path}: {errors.decode()}"
    # the children of a killed supervisor die with it
    wait_until(lambda: all(was is None or start_ticks(pid) != was for pid, was in ticks.items()))


@pytest.fixture
def run_command(capsys: pytest.CaptureFixture[str], bucket: str) -> Callable[..., str]:
    """Run a command on the bucket; what it printed."""

    def run(*argv: str) -> str:
        capsys.readouterr()
        code, printed = dispatch([*argv, "--root", bucket]), capsys.readouterr()
        assert code == 0, f"{argv}: {printed}"
        return printed.out

    return run


def test_a_run_that_is_killed_in_a_storm_is_what_it_would_be_on_a_disk(
    bucket: str,
    faults: FaultyS3,
    start: Start,
    tmp_path: Path,
    sandbox_kind: str,
    monkeypatch: pytest.MonkeyPatch,
    run_command: Callable[..., str],
) -> None:
    monkeypatch.delenv("AWS_MAX_ATTEMPTS")
    monkeypatch.chdir(tmp_path)
    before = set(descendants(os.getpid()))
    words = fresh(sandbox_kind)
    local = start(str(tmp_path / "local"), *words)
    faults.storm = STORM
    for life, (path, at, kept) in enumerate(STRIKES):
        struck(start(bucket, *(RESUME if life else words)), faults, path, at, kept)
    last = start(bucket, *RESUME)
    _, errors = last.communicate(timeout=300)
    assert last.returncode == 0, errors.decode()
    _, errors = local.communicate(timeout=300)
    assert local.returncode == 0, errors.decode()
    assert set(descendants(os.getpid())) <= before

    where, expected = f"{bucket}/r", determined(tmp_path / "local" / "r")
    stored = check_complete(where, GROUPS * N)
    assert determined(where) == expected
    assert len(stored.commits) == 1, "the end of `prorl run` compacts"
    order, there = replayed(RunDir(where)), replayed(RunDir(tmp_path / "local" / "r"))
    assert sorted(group for group, _ in order) == sorted(group for group, _ in there)

    count = "select count(*) as n, count(distinct group_id) as g, sum(reward) as r from rollouts"
    local_says = rows(StoredRun(tmp_path / "local" / "r"), count)
    for words in (["gc", "--grace-s", "0"], ["gc"]):
        run_command(*words)
        assert json.loads(run_command("sql", "r", count, "--json")) == local_says
        assert "are right" in run_command("verify", "r")
    assert [row["rollouts"] for row in json.loads(run_command("show", "--json"))] == [GROUPS * N]
    assert f"{GROUPS * N} rollouts in {GROUPS} groups" in run_command("show", "r")
    index = stored_index(StoredRun(where))
    assert streamed(where) == [row for group, _ in order for row in served(index.read(group))]
    assert (determined(where), replayed(RunDir(where))) == (expected, order)
    names = {path.split("/", 2)[2] for path in stored.directory.fs.find(stored.directory.root)}
    files = {file.path for commit in stored.commits for file in commit.files}
    others = {f"{table}/empty.parquet" for table in TABLES} | {"manifest.json"}
    assert names == files | others | {f"commits/{stored.commits[0].name}"}
    assert sum(faults.struck.values()) > 20, "the storm has blown"
