"""The table of tools: each row is served, offered to a policy, and carried into images."""

from __future__ import annotations

import io
import zipfile

import pytest

from prorl.envs import get_env
from prorl.envs.tools import IPYTHON, JUPYTER, PYTHON, schema_problem, served
from prorl.tools import bundle
from prorl.tools.catalogue import CATALOGUE
from prorl.types import Stage, Task


@pytest.mark.parametrize("name", CATALOGUE)
def test_every_row_can_be_made_offered_and_carried(name: str) -> None:
    row = CATALOGUE[name]
    assert callable(row.load().run)
    assert not schema_problem(served(name).parameters)
    with zipfile.ZipFile(io.BytesIO(bundle.build())) as packed:
        assert f"{row.module.replace('.', '/')}.py" in packed.namelist()


def test_a_task_names_further_tools_of_ours() -> None:
    math = get_env("math")
    task = Task(
        task_id="t",
        env="math",
        prompt="1+1?",
        data={"answer": "2", "tools": ["ipython", "python", "jupyter"]},
    )
    math.check(task)
    assert math.tools(task) == (PYTHON, IPYTHON, JUPYTER)
    spec = math.sandbox(task, Stage.RUN)
    assert spec is not None
    assert spec.tools == ("python", "ipython", "jupyter")
