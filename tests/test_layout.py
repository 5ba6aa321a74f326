"""Tests of which process runs which stages, and which bound decides."""

from __future__ import annotations

import pytest

from prorl.config import ServiceConfig
from prorl.config.layout import about, num_sandboxes, processes, settle, upstreams
from prorl.types import Json

CHAIN = ("init", "run", "eval")


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"workers": 0}, {"service": CHAIN}),
        ({"workers": 2}, {"worker-0": CHAIN, "worker-1": CHAIN}),
        ({"workers": "nodes"}, {}),
        ({"workers": 0, "gateway": "grpc+tls://far:1"}, {"worker-0": CHAIN}),
        (
            {"workers": 1, "eval": {"own_processes": 2}},
            {"worker-0": ("init", "run"), "eval-0": ("eval",), "eval-1": ("eval",)},
        ),
    ],
)
def test_the_processes_of_a_host_follow_from_its_configuration(
    fields: Json, expected: dict[str, tuple[str, ...]]
) -> None:
    config = ServiceConfig.model_validate(fields)
    assert processes(config) == expected
    for process, stages in expected.items():
        for stage in stages:
            for location in upstreams(config, process, stage):
                inside = location == config.worker_flight(process)
                chained = process == "service" or (stage != "init" and "run" in stages)
                assert inside is chained, "rows leave a process only where the chain ends"


@pytest.mark.parametrize(("cores", "workers"), [(2, 0), (4, 0), (5, 1), (64, 1)])
def test_auto_decides_by_cores(cores: int, workers: int) -> None:
    assert settle(ServiceConfig(), cores).workers == workers


def test_sandboxes_follow_the_slots_and_the_deciding_bound_is_reported() -> None:
    wide = ServiceConfig.model_validate({"workers": 0, "run": {"slots": 256}})
    assert num_sandboxes(wide) >= 2 * 256
    assert about(wide).endswith("run.slots: 256 rollouts at a time")
    few = wide.model_copy(update={"sandbox": wide.sandbox.model_copy(update={"max_sandboxes": 64})})
    assert num_sandboxes(few) == 64
    assert "sandbox.max_sandboxes: 64 at a time of 256 slots" in about(few)


def test_init_and_run_never_leave_their_chain() -> None:
    with pytest.raises(ValueError, match="only eval may leave its chain"):
        ServiceConfig.model_validate({"run": {"own_processes": 1}})
