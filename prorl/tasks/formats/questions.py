"""Questions with a final answer or a choice, under the names that data sets give them.

| format | rows of |
|---|---|
| prorl | ours: the fields of `prorl.types.Task` |
| answers | MATH and AIME (`problem`, `answer`), DeepScaleR, DAPO-Math, most home-made files |
| gsm8k | Cobbe et al. 2021; files of short answers have the same keys and are `answers` |
| choices, arc, gpqa, sciq | MMLU and its kin, ARC, GPQA, SciQ |
| verl | its Parquet files; a ground truth of inputs and outputs as JSON is a program's tests |
| nemo_gym | its JSON Lines: what is asked beside what its resources servers read |

Where the right choice comes first by the row's making, the choices are put in an order that depends
on the question alone. Rows of NeMo Gym's SWE agents (Nemotron's blends of SWE-Gym, SWE-bench and
R2E-Gym) hold another producer's row in `metadata.instance_dict`, and name its image there or by
`container_formatter`.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b

from prorl.errors import TaskError
from prorl.task_json import task_from_row
from prorl.tasks.formats import Format, Row, conversation, detect, mapping, name_of, text
from prorl.tasks.formats.programs import program_data
from prorl.tasks.formats.swe import IMAGES
from prorl.types import Json, Task

QUESTIONS = ("prompt", "question", "problem")
ANSWERS = ("answer", "expected_answer", "ground_truth", "final_answer", "target")
IDS = ("task_id", "unique_id", "id", "ID", "index")


def read_answers(row: Row, index: int) -> Task:
    """One of QUESTIONS, one of ANSWERS [, solution, data_source]."""
    source = row.get("data_source")
    source = source if isinstance(source, str) and source else "answers"
    data: dict[str, Json] = {"answer": answer(first(row, ANSWERS))}
    if isinstance(row.get("solution"), str):
        data["solution"] = row["solution"]
    return Task(
        task_id=name_of(row, source, index, *IDS),
        env="math",
        prompt=conversation(first(row, QUESTIONS)),
        data=data,
        data_source=source,
    )


def first(row: Row, keys: Iterable[str]) -> Json:
    """The value of the first key that the row has. Raises TaskError."""
    for key in keys:
        if row.get(key) is not None:
            return row[key]
    raise TaskError(f"found {', '.join(map(repr, row))}", f"one of {', '.join(keys)}", "add it")


def answer(value: Json) -> str:
    """A final answer as text. Raises TaskError.

    >>> answer(["1/2"]), answer(42)
    ('1/2', '42')
    """
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if (
        isinstance(value, bool)
        or not isinstance(value, str | int | float)
        or not str(value).strip()
    ):
        raise TaskError(f"the answer is {str(value)[:100]!r}", "a text or a number")
    return str(value).strip()


ANSWERS_FORMAT = Format("answers", ("|".join(QUESTIONS), "|".join(ANSWERS)), read_answers)


_SHORT_CHARS = 40


def read_gsm8k(row: Row, index: int) -> Task:
    """Worked solutions with calculator marks: `... <<48/2=24>>24 ... #### 72`."""
    question, solution = text(row, "question"), text(row, "answer")
    final = _final_answer(solution)
    if not final:
        raise TaskError(
            f"answer ends with {solution[-40:]!r}",
            "a last line `#### <number>`",
            "add the final answer",
        )
    data = {"answer": final.replace(",", ""), "solution": solution}
    return Task(
        task_id=f"gsm8k/{index}", env="math", prompt=question, data=data, data_source="gsm8k"
    )


def _final_answer(solution: str) -> str:
    """The last line behind its `####`, or below a line that ends with one; empty where none is.

    >>> [_final_answer(text) for text in ("so #### 72", "so\\n####\\n72\\n", "#### 72\\nso")]
    ['72', '72', '']
    """
    above, _, line = solution.rstrip().rpartition("\n")
    _, mark, answer = line.partition("####")
    if not mark and above.rstrip().endswith("####"):
        answer = line
    return answer.strip()


def is_worked(row: Row) -> bool:
    answer = row["answer"]
    return isinstance(answer, str) and ("####" in answer or len(answer) > _SHORT_CHARS)


GSM8K = Format("gsm8k", ("question", "answer"), read_gsm8k, is_worked)


_IDS = ("question_id", "id", "Record ID", "uuid")


def _choices(row: Row, source: str, index: int, prompt: str, choices: Json, answer: Json) -> Task:
    if not isinstance(choices, list) or not all(isinstance(choice, str) for choice in choices):
        raise TaskError(f"its choices are {str(choices)[:100]}", "a list of texts")
    return Task(
        task_id=name_of(row, source, index, *_IDS),
        env="stem",
        prompt=prompt,
        data={"choices": choices, "answer": answer},
        data_source=source,
    )


def read_listed(row: Row, index: int) -> Task:
    """question, choices or options (a list), answer (index, letter or text)."""
    choices = row.get("choices") or row.get("options")
    answer = row.get("answer")
    if isinstance(answer, str) and answer.isdigit() and answer not in (choices or ()):
        answer = int(answer)
    return _choices(row, "choices", index, text(row, "question"), choices, answer)


def read_labelled(row: Row, index: int) -> Task:
    """question, choices {text, label}, answerKey."""
    choices = row["choices"]
    if not isinstance(choices, dict) or row["answerKey"] not in choices.get("label", []):
        raise TaskError(f"answerKey {row['answerKey']!r}", "one of choices.label")
    place = choices["label"].index(row["answerKey"])
    return _choices(row, "arc", index, text(row, "question"), choices.get("text"), place)


def read_right_and_wrong(row: Row, index: int) -> Task:
    """Returns a task of GPQA's or SciQ's columns.

    GPQA has Question, Correct Answer, Incorrect Answer 1 ...; SciQ question, correct_answer,
    distractor1 ...
    """
    keys = ("Question", "Correct Answer", "Incorrect Answer ")
    if keys[1] not in row:
        keys = ("question", "correct_answer", "distractor")
    wrong = [text(row, key) for key in sorted(row) if key.startswith(keys[2])]
    right, prompt = text(row, keys[1]), text(row, keys[0])
    choices = sorted((right, *wrong), key=lambda choice: _order(prompt, choice))
    return _choices(row, "choices", index, prompt, choices, choices.index(right))


def _order(question: str, choice: str) -> bytes:
    return blake2b(f"{question}\0{choice}".encode("utf-8", "replace")).digest()


LISTED = Format("choices", ("question", "choices|options", "answer"), read_listed)
LABELLED = Format("arc", ("question", "choices", "answerKey"), read_labelled)
GPQA = Format("gpqa", ("Question", "Correct Answer", "Incorrect Answer 1"), read_right_and_wrong)
SCIQ = Format("sciq", ("question", "correct_answer", "distractor1"), read_right_and_wrong)


def read_verl(row: Row, index: int) -> Task:
    """prompt, reward_model [, data_source, ability, extra_info]."""
    reward_model = row["reward_model"]
    reward_model = (
        mapping(reward_model, "reward_model") if isinstance(reward_model, str) else reward_model
    )
    if not isinstance(reward_model, dict) or reward_model.get("ground_truth") is None:
        raise TaskError(
            f"reward_model is {str(reward_model)[:100]}", "an object with ground_truth", "add it"
        )
    source = row.get("data_source")
    source = source if isinstance(source, str) and source else "verl"
    extra = row.get("extra_info")
    extra = extra if isinstance(extra, dict) else {}
    tests = program_data(reward_model["ground_truth"])
    return Task(
        task_id=name_of(extra, source, index, "index"),
        env="code" if tests else "math",
        prompt=conversation(row["prompt"]),
        data=tests or {"answer": answer(reward_model["ground_truth"])},
        data_source=source,
    )


VERL = Format("verl", ("prompt", "reward_model"), read_verl)


def read_nemo_gym(row: Row, index: int) -> Task:
    params = row["responses_create_params"]
    metadata = params.get("metadata") if isinstance(params, dict) else None
    if isinstance(metadata, dict) and "instance_dict" in metadata:
        issue = _issue(metadata)
        return detect(issue).read(issue, index)
    prompt = conversation(params.get("input") if isinstance(params, dict) else params)
    env, data = _env_and_data(row)
    return Task(
        task_id=name_of(row, "nemo_gym", index, "uuid", "task_id", "id"),
        env=env,
        prompt=prompt,
        data=data,
        data_source="nemo_gym",
    )


def _issue(metadata: dict[str, Json]) -> dict[str, Json]:
    """Returns the row of another producer's that a row holds, with the image that it is run in."""
    inner = mapping(metadata["instance_dict"], "metadata.instance_dict")
    issue = {key: value for key, value in {**metadata, **inner}.items() if key != "instance_dict"}
    formatter = issue.pop("container_formatter", None)
    image = formatter[0] if isinstance(formatter, list) and formatter else formatter
    if isinstance(image, str) and not any(issue.get(key) for key in IMAGES):
        name = str(issue.get("instance_id"))
        # as swebench names images; files are called as the instance is
        image_id = name if image.startswith("/") else name.lower().replace("__", "_1776_")
        issue["docker_image"] = image.replace("{instance_id}", image_id)
    return issue


def _env_and_data(row: Row) -> tuple[str, dict[str, Json]]:
    """Returns the env that grades a row, and the task data that it wants."""
    metadata = row.get("verifier_metadata")
    if isinstance(metadata, dict) and isinstance(metadata.get("unit_tests"), dict):
        return "code", program_data(metadata["unit_tests"])
    if row.get("expected_answer") is None:
        raise TaskError(
            f"found {', '.join(map(repr, row))}",
            "expected_answer or verifier_metadata.unit_tests",
            "set the env of these rows with --env, and write them as task_id, env, prompt, data",
        )
    if isinstance(row.get("options"), list):
        choices = [str(text) for option in row["options"] for text in dict(option).values()]
        return "stem", {"choices": choices, "answer": answer(row["expected_answer"])}
    return "math", {"answer": answer(row["expected_answer"])}


NEMO_GYM = Format("nemo_gym", ("responses_create_params",), read_nemo_gym)


def read_prorl(row: Row, index: int) -> Task:
    """task_id, env, prompt [, data, data_source].

    Where the rows' `data` differ in types, `datasets` keeps each as a JSON text.
    """
    data = row.get("data")
    return task_from_row({**row, "data": mapping(data, "data")} if isinstance(data, str) else row)


PRORL = Format("prorl", ("task_id", "env", "prompt"), read_prorl)
