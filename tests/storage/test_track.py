"""Trackers get the numbers of the viewer's curves, and collectors the rollouts as traces."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from prorl.analysis.curves import curves
from prorl.analysis.synthetic_runs import add_commit, make_run
from prorl.analysis.traces import ReadPosition, traces
from prorl.analysis.track import STEP, VERSION, Scalar, follow, scalars
from prorl.cli.app import dispatch
from prorl.storage.read.catalog import StoredRun
from prorl.storage.write.metrics import LoggedStep, append_logged
from tests.waiting import wait_until


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """1,200 rollouts of five policy versions, and three steps of a trainer."""
    made = make_run(tmp_path / "runs" / "r", 1200, 3)
    for step in (1, 2, 3):
        values = {"loss": 1 / step, "my/own": float(step)}
        append_logged(made, LoggedStep(run="r", step=step, values=values, key=str(step)))
        replayed = LoggedStep(
            run="r-replayed", step=step, values={"loss": 9.0}, key=f"replay/{step}"
        )
        append_logged(made, replayed)
    return tmp_path / "runs" / "r"


def expected(run: Path) -> dict[tuple[str, int], float]:
    stored = StoredRun(run)
    rewards = stored.sql("select max_version as v, avg(reward) as y from rollouts group by 1")
    points = {("rollouts/reward", row["v"]): row["y"] for row in rewards.to_pylist()}
    return points | {("trainer/loss", step): 1 / step for step in (1, 2, 3)}


def check(run: Path, points: dict[tuple[str, int], float]) -> None:
    for key, value in expected(run).items():
        assert points[key] == pytest.approx(value), key
    names = {name for name, _ in points}
    assert {"rollouts/pass@1", "rollouts/pass@8", "groups/kept_share", "trainer/my/own"} <= names


def test_what_the_trainer_of_a_replay_logged_is_a_line_of_its_own(run: Path) -> None:
    stored = StoredRun(run)
    drawn = {curve["name"]: curve for curve in curves("step", lambda q: stored.sql(q).to_pylist())}
    rows = drawn["metric:loss"]["rows"]
    assert {row["x"]: row["y"] for row in rows if row["z"] == "r-replayed"} == {1: 9, 2: 9, 3: 9}
    own = {row["x"]: row["y"] for row in rows if row["z"] == ""}
    assert own == {step: pytest.approx(1 / step) for step in (1, 2, 3)}


class Kept:
    """A tracker of one's own that keeps what it gets."""

    written: list[Scalar]

    def __init__(self, run: StoredRun, folder: Path) -> None:
        self.written = []
        self.path = folder / "kept.json"

    def write(self, scalars: Sequence[Scalar]) -> None:
        assert len({(scalar.axis, scalar.at) for scalar in scalars}) == 1
        self.written += scalars

    def close(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_bytes(orjson.dumps([list(scalar) for scalar in self.written]))


def test_a_tracker_of_ones_own_gets_all_scalars(run: Path, tmp_path: Path) -> None:
    name = f"{__name__}:Kept"
    command = ["track", str(run), "--to", name, "--folder", str(tmp_path), "--once"]
    assert dispatch(command) == 0
    written = [Scalar(*row) for row in orjson.loads((tmp_path / "kept.json").read_bytes())]
    check(run, {(scalar.name, scalar.at): scalar.value for scalar in written})
    for axis in (VERSION, STEP):
        places = [scalar.at for scalar in written if scalar.axis == axis]
        assert places == sorted(places), "a tracker may refuse a step that goes back"


def test_a_version_is_sent_once_and_when_nothing_more_comes_of_it(
    run: Path, tmp_path: Path
) -> None:
    tracker, looks = Kept(StoredRun(run), tmp_path), iter((False, False, True))
    counts = []

    def wait(_: float) -> None:
        counts.append(Counter(scalar.axis for scalar in tracker.written))
        if len(counts) == 1:
            made, rng = StoredRun(run).directory, np.random.default_rng(0)
            add_commit(made, 4, range(1200, 1600), 150, 64, rng)

    follow(str(run), [tracker], lambda: next(looks), wait)
    versions = {
        scalar.at for scalar in tracker.written[: counts[0].total()] if scalar.axis == VERSION
    }
    newest = max(scalar.at for scalar in scalars(StoredRun(run)) if scalar.axis == VERSION)
    assert 0 in versions
    assert newest not in versions
    assert max(Counter(scalar[:3] for scalar in tracker.written).values()) == 1
    assert newest in {scalar.at for scalar in tracker.written}


def test_tensorboard_reads_the_same_numbers(run: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="no tensorboard: pip install tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import (  # type: ignore[import-not-found, unused-ignore]
        EventAccumulator,
    )

    command = ["track", str(run), "--to", "tensorboard", "--folder", str(tmp_path / "tb")]
    assert dispatch([*command, "--once"]) == 0
    events = EventAccumulator(str(tmp_path / "tb" / "r"))
    events.Reload()
    tags = events.Tags()["scalars"]
    check(run, {(tag, e.step): e.value for tag in tags for e in events.Scalars(tag)})


def test_wandb_reads_the_same_numbers_offline(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb", reason="no wandb: pip install wandb")

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    command = ["track", str(run), "--to", "wandb", "--folder", str(tmp_path / "w"), "--once"]
    assert dispatch(command) == 0
    (path,) = (tmp_path / "w").glob("wandb/offline-run-*/run-r.wandb")
    wait_until(lambda: expected(run).keys() <= history(path).keys(), "W&B's process wrote its file")
    check(run, history(path))


def history(path: Path) -> dict[tuple[str, int], float]:
    """Returns what a W&B file holds by now: its own process writes it."""
    from wandb.proto import wandb_internal_pb2  # type: ignore[import-not-found, unused-ignore]

    points: dict[tuple[str, int], float] = {}
    for content in records(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(content)
        row: dict[str, Any] = {
            item.key or "/".join(item.nested_key): orjson.loads(item.value_json)
            for item in record.history.item
        }
        at = int(row.get(VERSION, row.get(STEP, -1)))
        points |= {(name, at): value for name, value in row.items() if "/" in name}
    return points


def records(data: bytes) -> Iterator[bytes]:
    """Yields the records of a log as LevelDB writes it (W&B's file): blocks of 32 KiB behind a
    header of 7 bytes, in each records of a checksum, a length and a kind: whole, first, middle,
    last.
    """
    place, whole = 7, b""
    while place + 7 <= len(data):
        if 32768 - place % 32768 < 7:
            place += 32768 - place % 32768
            continue
        length = int.from_bytes(data[place + 4 : place + 6], "little")
        kind, content = data[place + 6], data[place + 7 : place + 7 + length]
        place += 7 + length
        whole = content if kind in (1, 2) else whole + content
        if kind in (1, 4):
            yield whole


@contextmanager
def collector() -> Iterator[tuple[str, list[bytes]]]:
    """An OTLP receiver whose first answer takes a second: its address, and the bodies it got."""
    bodies: list[bytes] = []

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if not bodies:
                time.sleep(1)
            bodies.append(body)
            self.send_response(200)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Receiver)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1/traces", bodies
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_a_collector_gets_each_rollout_as_a_trace_over_otlp(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("opentelemetry.sdk", reason="no OpenTelemetry SDK: the extra `otlp`")
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="the extra `otlp`")
    from opentelemetry.proto.collector.trace.v1 import (  # type: ignore[import-not-found, unused-ignore]
        trace_service_pb2,
    )

    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")
    make_run(tmp_path / "r", 600, 1)
    with collector() as (endpoint, bodies):
        command = ["track", str(tmp_path / "r"), "--to", "otlp", "--endpoint", endpoint]
        assert dispatch([*command, "--once"]) == 0
    spans = []
    for body in bodies:
        request = trace_service_pb2.ExportTraceServiceRequest()
        request.ParseFromString(body)
        spans += [s for r in request.resource_spans for scope in r.scope_spans for s in scope.spans]
    stored = StoredRun(tmp_path / "r")
    (counts,) = stored.sql(
        "select (select count(*) from turns) as turns, (select count(*) from tool_calls) as calls"
    ).to_pylist()
    kinds = Counter(span.name.split()[0] for span in spans)
    each = dict.fromkeys(("invoke_agent", "INIT", "RUN", "EVAL"), 600)
    assert kinds == Counter(each | {"chat": counts["turns"], "execute_tool": counts["calls"]}), (
        "one root and three stages a rollout, a span for each model call and tool call"
    )
    by_id = {span.span_id: span for span in spans}
    assert len(by_id) == len(spans)
    assert len({span.trace_id for span in spans}) == 600
    for span in spans:
        assert span.start_time_unix_nano <= span.end_time_unix_nano
        if span.name.startswith("invoke_agent"):
            assert not span.parent_span_id
        else:
            parent = by_id[span.parent_span_id]
            expected_parent = "RUN" if span.name[0].islower() else "invoke_agent native"
            assert (parent.name, parent.trace_id) == (expected_parent, span.trace_id)
    (chat, *_) = (span for span in spans if span.name.startswith("chat"))
    names = {attribute.key for attribute in chat.attributes}
    assert {"gen_ai.operation.name", "gen_ai.usage.input_tokens", "gen_ai.request.model"} <= names


def test_traces_go_on_behind_a_place_and_have_the_same_ids(tmp_path: Path) -> None:
    run = make_run(tmp_path / "r", 64, 2)
    trace_list = list(traces(StoredRun(run.root)))
    assert len(trace_list) == 64
    again = list(traces(StoredRun(run.root), trace_list[40].place))
    assert [trace.trace_id for trace in again] == [trace.trace_id for trace in trace_list[41:]]
    assert trace_list[0].place > ReadPosition()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--to", "moon"], "tracker 'moon'"),
        (["--to", "otlp", "tensorboard"], "a process of its own"),
        (["--to", "tensorboard", "--endpoint", "http://x"], "--endpoint without"),
    ],
)
def test_a_mistake_is_a_single_line(
    run: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert dispatch(["track", str(run), *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
