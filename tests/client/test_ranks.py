"""Tests of how a step is dealt to the ranks of a trainer, and that a forked process hears why it
cannot.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorl.analysis.synthetic import SyntheticShape, group
from prorl.analysis.synthetic_runs import write_run
from prorl.client import Client, PackedBatch, connect
from prorl.client.ranks import RankShare, deal
from prorl.errors import UserError
from tests.client.replay_process import served

SHAPE = SyntheticShape(n=8, num_tokens=400, rewritten_share=0.2)
STEP, MAX_TOKENS = 16, 8000

LENGTHS = st.lists(st.integers(1, 3000), min_size=1, max_size=200)


@given(LENGTHS, st.integers(1, 9), st.integers(1, 4000))
def test_every_row_is_dealt_once_in_as_many_passes_everywhere(
    lengths: list[int], world: int, max_tokens: int
) -> None:
    dealt = deal(lengths, world, max_tokens)
    rows = [row for passes in dealt for row_group in passes for row in row_group]
    assert sorted(rows) == list(range(len(lengths)))
    assert len({len(passes) for passes in dealt}) == 1
    for passes in dealt:
        for row_group in passes:
            assert list(row_group) == sorted(row_group)
            assert len(row_group) <= 1 or sum(lengths[row] for row in row_group) <= max_tokens
    assert deal(np.array(lengths), world, max_tokens) == dealt


@given(st.integers(2, 64), st.integers(0, 2**32 - 1))
def test_ranks_have_equal_tokens(world: int, seed: int) -> None:
    """64 sequences a rank, log-normal lengths as rollouts have them: 5 % at most."""
    rng = np.random.default_rng(seed)
    lengths = np.clip(rng.lognormal(7.5, 0.8, 64 * world).astype(np.int64), 16, 32000)
    loads = [sum(lengths[row] for rows in p for row in rows) for p in deal(lengths, world, 1 << 16)]
    assert max(loads) <= 1.05 * np.mean(loads)


@pytest.fixture(scope="module")
def location(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    groups = [group(i, SHAPE) for i in range(3 * STEP)]
    run_dir = write_run(tmp_path_factory.mktemp("runs") / "demo", groups, "demo")
    with served(run_dir) as where:
        yield where


@pytest.fixture
def client(location: str) -> Iterator[Client]:
    with connect(location) as client:
        yield client


def read(client: Client, rank: int, world: int, cursor: str = "demo@0") -> list[RankShare]:
    return list(
        client.stream_shares(
            "demo", rank, world, groups_per_step=STEP, max_tokens=MAX_TOKENS, cursor=cursor
        )
    )


def ids(share: RankShare) -> list[int]:
    return [int(i) for p in share.passes if p is not None for i in _ids(p)]


def _ids(batch: PackedBatch) -> list[int]:
    return list(batch.arrow.column("sequence_id").to_pylist())


@pytest.mark.parametrize("world", [1, 4, 7])
def test_shares_of_a_stream_are_disjoint_and_complete(client: Client, world: int) -> None:
    whole = list(client.stream("demo", cursor="demo@0", groups_per_batch=STEP))
    of_rank = [read(client, rank, world) for rank in range(world)]
    for step, batch in enumerate(whole):
        mine = [shares[step] for shares in of_rank]
        assert sorted(i for share in mine for i in ids(share)) == sorted(_ids(batch))
        assert {share.cursor for share in mine} == {batch.cursor}
        assert len({share.digest for share in mine}) == 1
        assert {share.num_trained for share in mine} == {int(batch.loss_mask().sum())}
        assert sum(share.num_tokens for share in mine) == batch.num_tokens
        assert max(share.num_tokens for share in mine) <= 1.05 * batch.num_tokens / world


def test_advantages_are_those_of_whole_groups(client: Client) -> None:
    (whole, *_) = client.stream("demo", cursor="demo@0", groups_per_batch=STEP)
    assert whole.advantages is not None
    advantage_by_id = dict(zip(_ids(whole), whole.advantages.tolist(), strict=True))
    for rank in range(4):
        for share_pass in read(client, rank, 4)[0].passes:
            assert share_pass is not None
            assert share_pass.advantages is not None
            assert share_pass.advantages.tolist() == [advantage_by_id[i] for i in _ids(share_pass)]


def test_the_same_cursor_gives_the_same_share_and_another_world_the_same_steps(
    client: Client,
) -> None:
    first = read(client, 2, 4)
    assert [ids(share) for share in read(client, 2, 4, first[0].cursor)] == [
        ids(share) for share in first[1:]
    ]
    assert [share.cursor for share in read(client, 0, 3)] == [share.cursor for share in first]


@pytest.mark.parametrize(("rank", "world"), [(4, 4), (-1, 4), (0, 0)])
def test_a_rank_that_its_world_does_not_have_is_refused(
    client: Client, rank: int, world: int
) -> None:
    with pytest.raises(UserError, match="0 <= rank < world"):
        read(client, rank, world)


def _forked(location: str, client: Client | None, errors: object) -> None:
    try:
        made = client or connect(location)
        next(made.stream("demo", cursor="demo@0"))
    except UserError as error:
        errors.put(str(error))  # type: ignore[attr-defined]


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("inherited", [True, False])
def test_a_forked_process_hears_at_once_that_it_cannot(
    location: str, client: Client, inherited: bool
) -> None:
    next(client.stream("demo", cursor="demo@0"))
    fork = multiprocessing.get_context("fork")
    errors = fork.SimpleQueue()
    child = fork.Process(target=_forked, args=(location, client if inherited else None, errors))
    child.start()
    child.join(60)
    hung = child.is_alive()
    child.kill()
    child.join()
    assert not hung
    assert "forked after" in errors.get()
