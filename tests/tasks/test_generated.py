"""Generated sets: right answers, repeatable, and nothing of the held-out split in training."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prorl.envs import get_env
from prorl.errors import TaskError
from prorl.tasks import load_tasks
from prorl.tasks.generated import OPENINGS, SETS, SUMS, generate, split_of, wordings
from prorl.types import Task

NAMES = sorted(SETS)


def _operands(task: Task) -> tuple[object, ...]:
    data = task.data
    if task.env == "repair":
        return tuple(data["bug"])
    return (
        tuple(data["operands"])
        if task.env == "arith"
        else (*data["items"], *data["quantities"], data["money"])
    )


def _wording(task: Task) -> str:
    text = re.sub(r"-?\d+(,\d+)?", "#", task.prompt)
    for name in (*task.data.get("items", ()), task.data.get("file"), task.data["form"]):
        text = text.replace(name, "@") if name else text
    return text


@pytest.mark.parametrize("name", ["arith", "shop"])
@given(seed=st.integers(0, 2**40), split=st.sampled_from(["train", "heldout"]))
@settings(max_examples=20)
def test_answers_are_right_and_the_env_takes_the_tasks(name: str, seed: int, split: str) -> None:
    env = get_env(name)
    for task in generate(name, split=split, seed=seed, n=20):
        env.check(task)
        assert str(eval(task.data["expression"])) == task.data["answer"]
        assert task.data["answer"].isdigit()
        reference = env.reference(task)
        assert reference.answer == task.data["answer"]
        assert reference.calls[-1].arguments == {"code": task.data["expression"]}


@given(seed=st.integers(0, 2**40), split=st.sampled_from(["train", "heldout"]))
@settings(max_examples=20)
def test_hidden_tests_pass_mended_modules_alone(seed: int, split: str) -> None:
    for task in generate("repair", split=split, seed=seed, n=10):
        data = task.data
        get_env("repair").check(task)
        assert data["source"].count(data["broken"]) == 1
        mended = data["source"].replace(data["broken"], data["mended"])
        for source, right in ((mended, True), (data["source"], False)):
            scope: dict[str, Any] = {}
            exec(data["prompt"] + source, scope)
            exec(data["test"], scope)
            try:
                scope["check"](scope["call"])
                assert right, task
            except AssertionError:
                assert not right, task


@pytest.mark.parametrize("name", NAMES)
def test_the_same_arguments_give_the_same_tasks_and_another_seed_gives_others(name: str) -> None:
    first = generate(name, seed=3, n=50)
    assert first == generate(name, seed=3, n=50)
    assert first[:10] == generate(name, seed=3, n=10)
    assert {task.prompt for task in first} != {task.prompt for task in generate(name, seed=4, n=50)}
    assert len({task.task_id for task in first}) == len({task.prompt for task in first}) == 50


@pytest.mark.parametrize("name", NAMES)
def test_heldout_operands_and_wordings_never_occur_in_training(name: str) -> None:
    train = generate(name, split="train", seed=1, n=4000)
    heldout = generate(name, split="heldout", seed=2, n=2000)
    assert {_operands(task) for task in train}.isdisjoint({_operands(task) for task in heldout})
    assert {_wording(task) for task in train}.isdisjoint({_wording(task) for task in heldout})
    assert {task.data["form"] for task in train} == {task.data["form"] for task in heldout}


@pytest.mark.parametrize("name", NAMES)
def test_every_heldout_word_is_a_word_of_training(name: str) -> None:
    words = [
        {
            word
            for task in generate(name, split=split, seed=1, n=3000)
            for word in re.findall("[A-Za-z]+", task.prompt)
        }
        for split in ("train", "heldout")
    ]
    assert words[1] <= words[0]


@given(st.lists(st.integers(0, 999), min_size=1, max_size=4))
def test_operands_belong_to_a_single_split_whatever_their_type(operands: list[int]) -> None:
    assert split_of(operands) == split_of(tuple(str(operand) for operand in operands))


def test_every_opening_and_phrase_is_in_training() -> None:
    for form in SUMS:
        pairs = wordings(OPENINGS, form.phrases, "train")
        assert {opening for opening, _ in pairs} == set(OPENINGS)
        assert {phrase for _, phrase in pairs} == set(form.phrases)


def test_task_specs_name_set_split_number_and_seed() -> None:
    assert load_tasks("arith:heldout?n=7&seed=9") == generate("arith", split="heldout", seed=9, n=7)
    assert load_tasks("shop:?n=3", env="noop", limit=2)[0].env == "noop"
    assert len(load_tasks("shop:train", limit=2)) == 2
    assert len(load_tasks("shop:train")) == 100


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("arith:tran", "split 'tran'"),
        ("arith:train?n=0", "n is a positive integer"),
        ("arith:train?n=ten", "n is a positive integer"),
        ("arith:train?count=3", "unknown count"),
        ("arith:train?n=99999999", "at most"),
    ],
)
def test_a_wrong_spec_says_what_is_wrong(spec: str, expected: str) -> None:
    with pytest.raises(TaskError, match=re.escape(expected)):
        load_tasks(spec)


def test_an_unknown_set_names_the_nearest() -> None:
    with pytest.raises(TaskError, match="did you mean `arith`"):
        generate("arit", n=1)
