"""R2E-Gym: commits with tests that were made for them.

The source is Jain et al. 2025, github.com/R2E-Gym/R2E-Gym. The producer's image (`docker_image`)
holds the repository before the commit in /testbed with its own Python in /testbed/.venv, the tests
in /r2e_tests and what runs them in /testbed/run_tests.sh. `expected_output_json` tells what each
test says after the commit: those that pass then must pass. The agent's workspace is without tests;
an image that others can read still holds them, so its admin takes them out of what RUN is given
where that matters (`prorl image build`).
"""

from __future__ import annotations

from prorl.errors import TaskError
from prorl.tasks.formats import Format, Row, mapping, text
from prorl.tasks.formats.swebench import WORKSPACE, image_of
from prorl.types import Json, Task

SETUP = """left="--exclude=./.venv --exclude=./r2e_tests --exclude=./run_tests.sh"
tar -C /testbed -cf - $left . | tar -xf - --no-same-owner
ln -sfn /testbed/.venv .venv"""
COMMAND = """rm -rf .venv r2e_tests
ln -s /testbed/.venv .venv
cp -r /r2e_tests r2e_tests
sed 's#/testbed/##g' /testbed/run_tests.sh > .git/run_tests.sh
bash .git/run_tests.sh"""
"""A change may bring folders of these names: they are the image's when the tests run."""
_PATH = "/testbed/.venv/bin:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"


def read(row: Row, index: int) -> Task:
    """A task of docker_image, expected_output_json and problem_statement.

    repo_name, commit_hash and parsed_commit_content are read where they are there.
    """
    expected = mapping(row["expected_output_json"], "expected_output_json")
    # A test's name without what the harness prints behind it.
    names = [name.split(" - ")[0].strip() for name, said in expected.items() if said == "PASSED"]
    if not names:
        raise TaskError("expected_output_json has no test that passes", "at least one")
    data: dict[str, Json] = {
        "image": image_of(text(row, "docker_image")),
        "setup": SETUP,
        "environment": {"PATH": _PATH, "PYTHONPATH": f"{WORKSPACE}/src:{WORKSPACE}"},
        "test_command": COMMAND,
        "FAIL_TO_PASS": names,
        "PASS_TO_PASS": [],
    }
    if patch := _patch(row.get("parsed_commit_content")):
        data["patch"] = patch
    task_id = f"{row.get('repo_name') or 'r2e'}-{row.get('commit_hash') or index}"
    prompt = text(row, "problem_statement")
    return Task(task_id=task_id, env="swe", prompt=prompt, data=data, data_source="r2e-gym")


def _patch(commit: Json) -> str:
    """The commit's changes but its tests, from `parsed_commit_content`; empty where it has none."""
    if not commit:
        return ""
    files = mapping(commit, "parsed_commit_content").get("file_diffs")
    found = []
    for one in files if isinstance(files, list) else []:
        path = one.get("header", {}).get("file", {}).get("path", "")
        is_test = any(part.startswith("test") for part in path.split("/")) or "_test." in path
        if path.endswith(".py") and not is_test:
            found.append(_diff(path, one))
    return "".join(found)


def _diff(path: str, one: dict[str, Json]) -> str:
    is_new = not one.get("old_file_content") and not one.get("minus_file")
    minus = "/dev/null" if is_new else f"a/{path}"
    mode = "new file mode 100644\n" if is_new else ""
    lines = [f"diff --git a/{path} b/{path}\n{mode}--- {minus}\n+++ b/{path}\n"]
    marks = {"context": " ", "added": "+", "deleted": "-"}
    for hunk in one.get("hunks", []):
        about = hunk["descriptor"]
        old, new = about["old_range"], about["new_range"]
        lines.append(f"@@ -{_range(old)} +{_range(new)} @@\n")
        for line in hunk["line_group"]["all_lines"]:
            if line["type"] in marks:
                lines.append(f"{marks[line['type']]}{line['content']}\n")
            else:
                lines.append("\\ No newline at end of file\n")
    return "".join(lines)


def _range(one: dict[str, Json]) -> str:
    length = one.get("length")
    return f"{one['start']}" if length is None else f"{one['start']},{length}"


FORMAT = Format("r2e-gym", ("docker_image", "expected_output_json", "problem_statement"), read)
