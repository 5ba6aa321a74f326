"""Other trainers' own code over a stored run: what trains is by hash what `prorl sql` says, and a
training that is killed and started again takes each group once. A trainer that is not installed is
a skip with its reason (`make test-adapters` installs what a registry has).
"""

from __future__ import annotations

import asyncio
import re
import warnings
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from prorl.analysis.synthetic import SyntheticShape, group
from prorl.analysis.synthetic_runs import write_run
from prorl.client.records import Feed, records
from prorl.errors import UserError
from prorl.trainer.adapters import check_version
from tests.client.replay_process import served
from tests.trainer.tiny_model import SHAPE
from tests.trainer.training_digest import counted, digest, of_response, stored

GROUPS = 6


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "demo"
    return write_run(folder, [group(i, SHAPE) for i in range(GROUPS)], "demo")


@pytest.fixture(scope="module")
def location(run_dir: Path) -> Iterator[str]:
    with served(run_dir) as where:
        yield where


@pytest.mark.parametrize(("version", "num_warnings"), [("1.16.9", 0), ("1.17.0", 1), ("2.16.0", 1)])
def test_an_untested_version_of_a_trainer_is_warned_of_once(
    version: str, num_warnings: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / f"trl-{version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: trl\nVersion: {version}\n")
    monkeypatch.syspath_prepend(tmp_path)
    check_version.cache_clear()
    with warnings.catch_warnings(record=True) as lines:
        warnings.simplefilter("always")
        check_version("trl")
        check_version("trl")
    check_version.cache_clear()
    assert len(lines) == num_warnings
    assert all(
        f"trl {version}: prorl's adapter was tried with 1.16" in str(warning.message)
        for warning in lines
    )


def test_records_are_what_sql_says(location: str, run_dir: Path) -> None:
    fed = [record for group in Feed(location, "demo", consumer="all") for record in group]
    assert counted(digest(record.ids, record.mask, record.logprobs) for record in fed) == stored(
        run_dir
    )


def test_plain_flight_as_the_docs_have_it(location: str, run_dir: Path) -> None:
    page = Path(__file__).parents[2] / "docs" / "trainer.md"
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    (code,) = (block for block in blocks if "class Plain" in block)
    assert "prorl" not in code.replace("prorl.cursor", "").replace("prorl.end", "")
    names: dict[str, Any] = {}
    exec(code, names)
    plain, digests = names["Plain"](location), []
    for table, cursor in plain.groups("demo", "plain"):
        digests += [digest(*row[:3]) for row in names["rows"](table)]
        plain.commit("demo", "plain", cursor)
    assert counted(digests) == stored(run_dir)
    assert not list(names["Plain"](location).groups("demo", "plain")), "it was committed"


@pytest.mark.filterwarnings("ignore")
def test_torch_with_a_worker(location: str, run_dir: Path) -> None:
    from torch.utils.data import DataLoader

    from prorl.trainer.dataset import RolloutDataset

    bounds = {"groups_per_step": 2, "max_tokens": 64}
    loader: Any = DataLoader(
        RolloutDataset(location, "demo", 0, 1, consumer="torch", **bounds),
        batch_size=None,
        num_workers=1,
        multiprocessing_context="spawn",
    )
    digests = []
    for share in loader:
        for batch in share.passes:
            digests += [
                digest(record.ids, record.mask, record.logprobs) for record in records(batch)
            ]
    assert counted(digests) == stored(run_dir)


def test_tinker(location: str, run_dir: Path) -> None:
    pytest.importorskip("tinker", reason="Tinker is not installed (pip install tinker)")
    from prorl.trainer.adapters.tinker import datum_of

    digests = []
    for siblings in Feed(location, "demo", consumer="tinker"):
        for record in siblings:
            datum = datum_of(record)
            inputs = {name: data.to_numpy() for name, data in datum.loss_fn_inputs.items()}
            first = datum.model_input.to_ints()[:1]
            digests.append(
                of_response(first, inputs["target_tokens"], inputs["mask"], inputs["logprobs"])
            )
            trained = inputs["mask"].astype(bool)
            assert not inputs["advantages"][~trained].any()
    assert counted(digests) == stored(run_dir)


def test_slime(location: str, run_dir: Path, tmp_path: Path) -> None:
    pytest.importorskip("slime", reason="slime is not installed (git only: PYTHONPATH=slime)")
    from slime.observability.rollout_data_utils import validate_rollout_id_annotated
    from slime.rollout.base_types import call_rollout_fn

    from prorl.trainer.adapters.slime import FeedGroups, rewards, rollout

    args = SimpleNamespace(
        prorl_url=location,
        prorl_run="demo",
        prorl_consumer="slime",
        rollout_batch_size=2,
        save=str(tmp_path),
        load=str(tmp_path),
    )
    source, steps = FeedGroups(args), []
    for step in (0, 1):
        output = call_rollout_fn(rollout, args, step, source, evaluation=False)
        validate_rollout_id_annotated(output.samples)
        steps.append(output.samples)
        if step == 0:
            source.save(step)
    again = FeedGroups(args)  # killed in step 1, whose checkpoint is not there
    again.load(0)
    steps[1:] = [
        call_rollout_fn(rollout, args, step, again, evaluation=False).samples for step in (1, 2)
    ]
    samples = [sample for step in steps for group in step for sample in group]
    assert counted(
        of_response(
            sample.tokens[: -sample.response_length],
            sample.tokens[-sample.response_length :],
            sample.loss_mask,
            sample.rollout_log_probs,
        )
        for sample in samples
    ) == stored(run_dir)
    shaped_rewards, advantages = rewards(args, samples)
    for start in {sample.group_index for sample in samples}:
        here = [i for i, sample in enumerate(samples) if sample.group_index == start]
        by_rollout = {samples[i].rollout_id: (shaped_rewards[i], advantages[i]) for i in here}
        values = np.array(list(by_rollout.values()))
        assert abs(values[:, 1].mean()) < 1e-5, "normalised in its own group"
    with pytest.raises(UserError, match="has ended with 0 of 2 groups"):
        rollout(args, 3, again)


def test_slime_replays_what_the_run_kept(location: str) -> None:
    pytest.importorskip("slime", reason="slime is not installed (git only: PYTHONPATH=slime)")
    import torch
    from slime.observability.rollout_data_utils import validate_rollout_routed_experts_for_replay

    from prorl.trainer.adapters.slime import sample_of

    args = SimpleNamespace(use_rollout_routing_replay=True, num_layers=3, moe_router_topk=2)
    (record, *_) = next(iter(Feed(location, "demo", consumer="replays", routed_experts=True)))
    with pytest.raises(UserError, match="without the experts of all its tokens"):
        sample_of(record, args)
    num_routed = len(record.ids) - 1
    kept = record._replace(
        routed_experts=np.arange(num_routed * 6, dtype=np.uint8).reshape(num_routed, 6)
    )
    experts = torch.as_tensor(sample_of(kept, args).rollout_routed_experts)
    validate_rollout_routed_experts_for_replay([experts], args)
    assert experts[4].flatten().tolist() == list(range(24, 30))


def test_prime_rl(location: str, run_dir: Path, tmp_path: Path) -> None:
    pytest.importorskip("prime_rl", reason="prime-rl is not installed (git only: PYTHONPATH=src)")
    from prime_rl.transports.rollouts.filesystem import FileSystemMicroBatchReceiver

    from prorl.trainer.adapters.prime_rl import STATE, Steps

    def steps() -> Steps:
        feed = Feed(location, "demo", consumer="prime")
        return Steps(feed, tmp_path, ranks=2, seq_len=64, groups_per_step=2)

    writing = iter(steps())
    assert [next(writing), next(writing)] == [0, 1]
    torn = tmp_path / "rollouts" / "step_1"
    before = (torn / "rank_1.bin").read_bytes()
    (torn / STATE).unlink()  # killed before the step was whole
    (torn / "rank_1.bin").unlink()
    assert list(steps()) == [1, 2]
    assert (torn / "rank_1.bin").read_bytes() == before
    steps().commit(2)
    digests = []
    for rank in range(2):
        receiver = FileSystemMicroBatchReceiver(tmp_path, rank)
        for _ in range(3):
            for batch in receiver.receive():
                borders = np.cumsum([0, *batch.sequence_lengths])
                for start, stop in pairwise(borders):
                    here = slice(int(start), int(stop))
                    digests.append(
                        digest(
                            batch.input_ids[here],
                            batch.loss_mask[here],
                            batch.inference_logprobs[here],
                        )
                    )
    assert counted(digests) == stored(run_dir)


def test_skyrl_by_its_shapes(location: str, run_dir: Path) -> None:
    """SkyRL 0.4 asks for Python 3.12: its lists as shared/data/trainers/rows.py has them."""
    from prorl.trainer.adapters.skyrl import Generator

    whole = SyntheticShape(n=4, num_tokens=24, num_turns=2, vocab_size=64)
    ids = [SimpleNamespace(instance_id=f"t{i // 4}", repetition_id=i % 4) for i in range(8)]
    prompt_batch = {"prompts": [[]] * 8, "trajectory_ids": ids}
    refused = Generator(Feed(location, "demo", consumer="ragged"))
    with pytest.raises(UserError, match="sequences for 1 row"):
        asyncio.run(refused.generate({"prompts": [[]], "trajectory_ids": ids[:1]}))
    folder = run_dir.parent / "whole"
    write_run(folder, [group(i, whole) for i in range(4)], "whole")
    with served(folder) as where:
        generator = Generator(Feed(where, "whole", consumer="skyrl"))
        first = asyncio.run(generator.generate(prompt_batch))
        saved = generator.feed.state_dict()
        asyncio.run(generator.generate(prompt_batch))  # killed before its checkpoint
        again = Generator(Feed(where, "whole", consumer="skyrl"))
        again.feed.load_state_dict(saved)
        second = asyncio.run(again.generate(prompt_batch))
    digests = [
        of_response(*row)
        for output in (first, second)
        for row in zip(
            output["prompt_token_ids"],
            output["response_ids"],
            output["loss_masks"],
            output["rollout_logprobs"],
            strict=True,
        )
    ]
    assert counted(digests) == stored(folder)
    assert {len(value) for value in first.values() if isinstance(value, list)} == {8}


def test_verl_through_its_own_transfer_queue(
    location: str, run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("verl", reason="verl is not installed (pip install --no-deps verl==0.9.0)")
    from tests.trainer.verl_script import trained

    monkeypatch.setenv("PRORL_URL", location)
    monkeypatch.setenv("PRORL_RUN", "demo")
    monkeypatch.setenv("PRORL_CONSUMER", "verl")
    rows = trained(tmp_path, kill_after=2, steps=3, prompts=2)
    assert counted(of_response(*row) for row in rows) == stored(run_dir)


def test_verl_that_is_resumed_forgets_where_later_steps_began(tmp_path: Path) -> None:
    """With another batch size they begin elsewhere: a commit of the old place would lose groups."""
    from prorl.trainer.adapters.verl import LATEST, STATE, Manager

    class CommittingFeed(Feed):
        committed: str | None = None

        def commit(self, cursor: str | None = None) -> None:
            self.committed = cursor

    (tmp_path / STATE).write_text('{"1": "demo@0", "2": "demo@2", "3": "demo@4"}')
    config = SimpleNamespace(trainer=SimpleNamespace(default_local_dir=str(tmp_path)))
    feed = CommittingFeed("unused", "demo")
    manager = Manager(config, feed)
    manager._begin(2)
    assert feed.cursor == "demo@2"
    (tmp_path / LATEST).write_text("2")
    feed.cursor = "demo@3"
    manager._begin(3)
    assert feed.committed == "demo@3"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_worker_of_trl_says_what_ended_its_feed() -> None:
    from prorl.trainer.adapters.trl_async import Worker

    class Broken(Feed):
        def __iter__(self) -> Iterator[list[Any]]:
            raise KeyError("of no kind of ours")

    worker = Worker(Broken("unused", "demo"), 1)
    worker.start()
    worker._thread.join(20)
    with pytest.raises(KeyError, match="of no kind of ours"):
        worker.check_health(1.0)


@pytest.mark.filterwarnings("ignore")
def test_trl_async(
    location: str, run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("trl", reason="TRL is not installed (pip install trl==1.16.0)")
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    from tests.trainer.tiny_model import save_model
    from tests.trainer.trl_async_script import make

    folder = run_dir.parent / "async"
    shape = SyntheticShape(n=4, num_tokens=24, num_turns=2, vocab_size=64)
    write_run(folder, [group(i, shape) for i in range(GROUPS)], "async")
    model = save_model(tmp_path / "model")
    with served(folder) as where:
        feed = Feed(where, "async", consumer="trl")
        seen: list[Any] = []
        make(feed, model, tmp_path / "out", 1, 1, seen).train()
        assert feed.state_dict()["cursor"] is not None
        feed = Feed(where, "async", consumer="trl")
        make(feed, model, tmp_path / "out", 3, 2, seen).train(resume_from_checkpoint=True)
    digests = counted(
        digest(row["input_ids"], row["completion_mask"], row["old_log_probs"]) for row in seen
    )
    assert digests == stored(folder)
