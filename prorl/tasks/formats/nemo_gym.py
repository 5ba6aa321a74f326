"""Rows as NeMo Gym's JSON Lines have them.

A row has `responses_create_params` (what is asked) beside what its resources servers read:
`expected_answer`, `options`, or `verifier_metadata.unit_tests`. Rows of its SWE agents (Nemotron's
blends of SWE-Gym, SWE-bench, R2E-Gym) hold another producer's row in `metadata.instance_dict`, and
name its image there or by `container_formatter`.
"""

from __future__ import annotations

from prorl.errors import TaskError
from prorl.tasks.formats import Format, Row, answers, conversation, detect, mapping, name_of
from prorl.tasks.formats.programs import program_data
from prorl.tasks.formats.swebench import IMAGES
from prorl.types import Json, Task


def read(row: Row, index: int) -> Task:
    """responses_create_params, and what it is judged by."""
    asked = row["responses_create_params"]
    metadata = asked.get("metadata") if isinstance(asked, dict) else None
    if isinstance(metadata, dict) and "instance_dict" in metadata:
        issue = _issue(metadata)
        return detect(issue).read(issue, index)
    prompt = conversation(asked.get("input") if isinstance(asked, dict) else asked)
    env, data = _judged(row)
    return Task(
        task_id=name_of(row, "nemo_gym", index, "uuid", "task_id", "id"),
        env=env,
        prompt=prompt,
        data=data,
        data_source="nemo_gym",
    )


def _issue(metadata: dict[str, Json]) -> dict[str, Json]:
    """The row of another producer's that a row holds, with the image that it is run in."""
    inner = mapping(metadata["instance_dict"], "metadata.instance_dict")
    issue = {key: value for key, value in {**metadata, **inner}.items() if key != "instance_dict"}
    formatter = issue.pop("container_formatter", None)
    image = formatter[0] if isinstance(formatter, list) and formatter else formatter
    if isinstance(image, str) and not any(issue.get(key) for key in IMAGES):
        name = str(issue.get("instance_id"))
        # as swebench names images; files are called as the instance is
        shown = name if image.startswith("/") else name.lower().replace("__", "_1776_")
        issue["docker_image"] = image.replace("{instance_id}", shown)
    return issue


def _judged(row: Row) -> tuple[str, dict[str, Json]]:
    """The env that judges a row, and the task data that it wants."""
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
        return "stem", {"choices": choices, "answer": answers.answer(row["expected_answer"])}
    return "math", {"answer": answers.answer(row["expected_answer"])}


FORMAT = Format("nemo_gym", ("responses_create_params",), read)
