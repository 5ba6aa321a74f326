"""Rows of software engineering: SWE-bench and its shape (Lite, Verified, Multilingual, SWE-Gym,
SWE-rebench), SWE-smith, R2E-Gym.

SWE-bench is Jimenez et al. 2024, github.com/SWE-bench/SWE-bench; SWE-rebench has `install_config`.
A row that brings no repository of its own (`files`, `archive`, `image`, as `prorl/envs/swe` reads
them) is run in its producer's image: `docker_image`, `image_name` or, as SWE-bench names them,
`swebench/sweb.eval.x86_64.<instance>`. In SWE-bench's images the repository lies in /testbed and
its Python in the conda environment `testbed`: the repository is copied into the workspace, and
imported from there. Rows of swebench 5, of any language, say the rest themselves: `image`,
`log_parser` and `eval_script`, of which what brings the tests' patch is left out, for the env does
that.

SWE-smith (Yang et al. 2025, github.com/SWE-bench/SWE-smith) puts faults into repositories: `patch`
is the diff that puts the fault in, the repository without it lies in /testbed of `image_name`. So
the workspace is /testbed with the fault, the reference is the reverse of `patch`, and the tests are
the repository's own.

R2E-Gym (Jain et al. 2025, github.com/R2E-Gym/R2E-Gym) made tests for commits. `docker_image` holds
the repository before the commit in /testbed with its own Python in /testbed/.venv, the tests in
/r2e_tests and what runs them in /testbed/run_tests.sh. `expected_output_json` tells what each test
says after the commit: those that pass then must pass.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence

from prorl.errors import TaskError
from prorl.tasks.formats import Format, Row, mapping, text
from prorl.types import DOCKER, Json, Task

WORKSPACE = "/workspace"
IMAGES = ("docker_image", "image_name", "image_url")
_CONDA = "/opt/miniconda3"
_PATHS = re.compile(r"^\+\+\+ b/([^\t\n]+)", re.MULTILINE)
PYTEST = "python -m pytest -rA --tb=short -p no:cacheprovider"
_REQUIREMENT = re.compile(
    r"[A-Za-z0-9][\w.-]*(\[[\w., -]+\])?\s*((===?|[<>~!]=?|@)\s*\S.*|;.*)?(#.*)?"
)
_COMMANDS = frozenset(["make", "true", "tox", "nox", "ninja", "meson", "autogen"])
COMMANDS: Mapping[str, str] = {
    "django/django": "./tests/runtests.py --verbosity 2 --settings=test_sqlite --parallel 1",
    "sympy/sympy": "bin/test -C --verbose",
    "sphinx-doc/sphinx": "tox --current-env -epy39 -v --",
}
"""The commands that SWE-bench's harness runs for the repositories that pytest does not; files
follow.
"""
NO_TESTS = (".txt", ".json", ".md")
PYTHON = ("python", "sympy")
"""Parsers of logs whose tests run in the conda environment."""
_HEREDOC = re.compile(r"git apply .*<<\s*'?(\w+)'?$")
_SKIPPED = ("#!", "set -", "git ", ": '>>>>>", "python -m pip install -e ", "pip install -e ")
SWE_GYM = frozenset(
    [
        "Project-MONAI/MONAI",
        "bokeh/bokeh",
        "conan-io/conan",
        "dask/dask",
        "facebookresearch/hydra",
        "getmoto/moto",
        "iterative/dvc",
        "modin-project/modin",
        "pandas-dev/pandas",
        "pydantic/pydantic",
        "python/mypy",
    ]
)
"""Repositories of SWE-Gym (Pan et al. 2024), whose images are named in another way."""
PRODUCERS_PARSERS = (
    ("pytest", "python"),
    ("django", "python"),
    ("unittest", "python"),
    ("seaborn", "python"),
    ("matplotlib", "python"),
    ("sympy", "sympy"),
    ("gotest", "go"),
    ("cargo", "cargo"),
    ("jest", "jest"),
    ("vitest", "jest"),
    ("mocha", "jest"),
    ("karma", "jest"),
    ("maven", "maven"),
    ("gradle", "gradle"),
    ("tap", "tap"),
)
"""The beginnings of producers' own parsers, and which of ours reads the same."""


def read_swebench(row: Row, index: int) -> Task:
    """Returns a task of instance_id, problem_statement, test_patch and FAIL_TO_PASS.

    All else is kept as it is.
    """
    if isinstance(script := row.get("eval_script"), str):
        fields = {key: value for key, value in row.items() if key not in ("eval_script", "image")}
        row = {**fields, "docker_image": row.get("image"), "test_command": _commands(script)}
    data = {key: value for key, value in row.items() if key != "problem_statement"}
    config = data.pop("install_config", None) or {}
    _rename(data, row, config if isinstance(config, dict) else {})
    if not any(data.get(name) for name in ("files", "archive", "image")):
        data |= in_image(row, data, _image(row))
    packages = config.get("pip_packages") if isinstance(config, dict) else None
    if data.get("archive") and packages and not data.get("requirements"):
        data["requirements"] = packages
    if isinstance(parser := data.get("log_parser"), str):
        data["log_parser"] = parser_of(parser)
    for name in (*IMAGES, "test_command", "setup"):
        if name in IMAGES or data.get(name) == "":
            data.pop(name, None)
    task_id, prompt = text(row, "instance_id"), text(row, "problem_statement")
    return Task(task_id=task_id, env="swe", prompt=prompt, data=data, data_source="swebench")


def _rename(data: dict[str, Json], row: Row, config: Mapping[str, Json]) -> None:
    """Renames the fields that producers call otherwise, or keep in `install_config`, to ours."""
    if not data.get("test_command"):
        command = data.pop("test_cmd", None) or data.pop("test_commands", None)
        command = _joined(command or config.get("test_cmd"))
        data["test_command"] = _with_files(command, row) if command else ""
    is_bare = any(data.get(name) for name in ("archive", "repo_archive", "files"))
    if is_bare and not data.get("requirements"):
        for name in ("install", "setup"):
            if listed := _requirements(data.get(name)):
                data["requirements"] = listed
                del data[name]
                break
    for ours, theirs in (("archive", "repo_archive"), ("setup", "install")):
        if data.get(theirs) and not data.get(ours):
            data[ours] = _joined(data.pop(theirs))
    if isinstance(config.get("env_vars"), dict) and not data.get("environment"):
        data["environment"] = {str(key): str(value) for key, value in config["env_vars"].items()}


def _image(row: Row) -> str:
    """The image that a row's producer has for it: named by the row, or after the instance."""
    named = next((row[key] for key in IMAGES if row.get(key)), None)
    gym = row.get("repo") in SWE_GYM
    owner, between = ("xingyaoww", "_s_") if gym else ("swebench", "_1776_")
    instance = text(row, "instance_id").lower().replace("__", between)
    image = named or f"{owner}/sweb.eval.x86_64.{instance}"
    if not isinstance(image, str):
        raise TaskError(f"its image is {image!r}"[:200], "a name")
    return image


def in_image(row: Row, data: Mapping[str, Json], image: str) -> dict[str, Json]:
    """Returns the data that a row needs to run in an image that SWE-bench made."""
    roots = ":".join((f"{WORKSPACE}/src", f"{WORKSPACE}/lib", WORKSPACE))
    path = f"{_CONDA}/envs/testbed/bin:{_CONDA}/bin:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
    environment = data.get("environment")
    variables = environment if isinstance(environment, dict) else {}
    command = data.get("test_command")
    files = [] if command else _PATHS.findall(text(row, "test_patch"))
    if files and not any(name.endswith((".py", *NO_TESTS)) for name in files):
        raise TaskError(
            f"how the tests of {files[0]} are run is not known",
            "test_command, or eval_script, image and log_parser as swebench 5 publishes them",
        )
    parser = str(data.get("log_parser") or "python")
    python = {"PATH": path, "PYTHONPATH": roots} if parser_of(parser) in PYTHON else {}
    return {
        "image": image_of(image),
        "setup": f"cp -a /testbed/. .\n{data.get('setup') or ''}".strip(),
        "environment": {**python, **variables},
        "test_command": command or _with_files(COMMANDS.get(str(row.get("repo")), PYTEST), row),
    }


def _commands(script: str) -> str:
    """Returns what an `eval_script` of swebench's runs but for its git: in the workspace, not in
    /testbed.

    >>> _commands("#!/bin/bash\\nset -x\\ncd /testbed\\ngit apply - <<'E'\\n+x\\nE\\nmake test")
    'cd /workspace\\nmake test'
    """
    lines, end = [], ""
    for line in script.splitlines():
        if end:
            end = "" if line == end else end
        elif match := _HEREDOC.match(line):
            end = match[1]
        elif not line.startswith(_SKIPPED):
            lines.append(line.replace("/testbed", WORKSPACE))
    return "\n".join(lines)


def image_of(name: str) -> str:
    """Returns what a task says of an image that a row names as container engines do; a path stays.

    >>> image_of("swebench/sweb.eval.x86_64.psf_1776_requests-1142:latest"), image_of("/img/a.sif")
    ('docker://swebench/sweb.eval.x86_64.psf_1776_requests-1142:latest', '/img/a.sif')
    """
    return name if name.startswith("/") else DOCKER + name.removeprefix(DOCKER)


def parser_of(name: str) -> str:
    """Our log parser for the one that a producer names (`parse_log_pytest_v2`, `gotest` ...).

    >>> parser_of("parse_log_pytest_v2"), parser_of("parse_log_gotest"), parser_of("sympy")
    ('python', 'go', 'sympy')
    """
    plain = name.removeprefix("parse_log_")
    return next((ours for start, ours in PRODUCERS_PARSERS if plain.startswith(start)), name)


def names_of(row: Row, key: str) -> list[str]:
    """Tests' names of a row: a list, or its JSON text. Raises TaskError."""
    value = row.get(key) or []
    try:
        value = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        value = None
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise TaskError(f"{key!r} is {str(row[key])[:100]}", "a list of tests' names")
    return value


def _joined(command: Json) -> str:
    """A command, or a list of them."""
    if isinstance(command, list):
        return "\n".join(map(str, command))
    return command if isinstance(command, str) else ""


def _requirements(install: Json) -> list[str]:
    """Returns what a row installs, if each line is a requirement and no command; else nothing.

    >>> _requirements(["pytest==7.4", "six"]), _requirements("make"), _requirements(["six"])
    (['pytest==7.4', 'six'], [], ['six'])
    """
    lines = install if isinstance(install, list) else str(install or "").splitlines()
    requirements = [str(line).strip() for line in lines if str(line).strip()]
    is_listed = isinstance(install, list) and not _COMMANDS.intersection(requirements)
    has_versions = any(set(line) & set("=<>~@") for line in requirements)
    is_all = all(map(_REQUIREMENT.fullmatch, requirements))
    return requirements if is_all and (is_listed or has_versions) else []


def _with_files(command: str, row: Row) -> str:
    """Appends the tests' files to a command as harnesses do, unless it has them: the files
    of the tests' patch, and those that the names of tests tell of.
    """
    names = [*names_of(row, "FAIL_TO_PASS"), *names_of(row, "PASS_TO_PASS")]
    named = [name.partition("::")[0] for name in names if ".py::" in name]
    files = _PATHS.findall(text(row, "test_patch"))
    if any(path in command for path in files):
        files = [path for path in named if path not in command and "pytest" in command]
    else:
        files += named
    files = list(dict.fromkeys(files))
    if "runtests.py" in command:
        files = [_label(path) for path in files if path.endswith(".py")]
    test_files: Sequence[str] = [path for path in files if not path.endswith(NO_TESTS)]
    return f"{command} {' '.join(map(shlex.quote, test_files))}".rstrip()


def _label(path: str) -> str:
    """A test file as Django's runner names it.

    >>> _label("tests/auth_tests/test_forms.py")
    'auth_tests.test_forms'
    """
    return path.removeprefix("tests/").removesuffix(".py").replace("/", ".")


SWEBENCH = Format(
    "swebench", ("instance_id", "problem_statement", "test_patch", "FAIL_TO_PASS"), read_swebench
)


_EOP = "PRORL_EOP_OF_PATCH"
_OTHER_SIGN = {"+": "-", "-": "+"}
_HUNK = re.compile(r"^@@ -(\S+) \+(\S+) @@(.*)$", re.DOTALL)


def reverse(patch: str) -> str:
    """The unified diff that undoes one.

    >>> print(reverse("--- a/x\\n+++ b/x\\n@@ -1,2 +1 @@ f\\n-a\\n-b\\n+c\\n"), end="")
    --- a/x
    +++ b/x
    @@ -1 +1,2 @@ f
    +a
    +b
    -c
    """
    lines: list[str] = []
    is_head = True
    for line in patch.splitlines(keepends=True):
        hunk = _HUNK.match(line)
        is_head = not hunk and (is_head or line.startswith("diff --git "))
        lines.append(_reversed_head(line) if is_head else _reversed_body(line))
        if is_head and lines[-1].startswith("--- ") and lines[:-1] and lines[-2].startswith("+++ "):
            lines[-2], lines[-1] = lines[-1], lines[-2]
    return "".join(lines)


def _reversed_body(line: str) -> str:
    """A line of a hunk, with what goes and what comes exchanged."""
    if hunk := _HUNK.match(line):
        return f"@@ -{hunk[2]} +{hunk[1]} @@{hunk[3]}"
    return _OTHER_SIGN.get(line[0], line[0]) + line[1:]


def _reversed_head(line: str) -> str:
    """Returns a line before a file's hunks, with what was and what will be exchanged."""
    for first, second in (("new file mode ", "deleted file mode "), ("old mode ", "new mode ")):
        for was, is_now in ((first, second), (second, first)):
            if line.startswith(was):
                return is_now + line.removeprefix(was)
    if line.startswith("--- "):
        return "+++ " + line[4:].replace("a/", "b/", 1)
    if line.startswith("+++ "):
        return "--- " + line[4:].replace("b/", "a/", 1)
    return line


def read_smith(row: Row, index: int) -> Task:
    """Reads instance_id, problem_statement, patch, FAIL_TO_PASS, PASS_TO_PASS, image_name."""
    kept = ("repo", "base_commit", "FAIL_TO_PASS", "PASS_TO_PASS")
    data = {key: row[key] for key in kept if row.get(key)}
    fault = text(row, "patch")
    names = (*names_of(row, "FAIL_TO_PASS"), *names_of(row, "PASS_TO_PASS"))
    files = sorted({name.partition("::")[0] for name in names if "::" in name})
    fields = {
        **data,
        "setup": f"git apply --whitespace=nowarn - <<'{_EOP}'\n{fault.rstrip()}\n{_EOP}",
        "test_command": f"{PYTEST} {' '.join(map(shlex.quote, files))}",
    }
    return Task(
        task_id=text(row, "instance_id"),
        env="swe",
        prompt=text(row, "problem_statement"),
        data={**data, "patch": reverse(fault), **in_image(row, fields, text(row, "image_name"))},
        data_source="swe-smith",
    )


SMITH = Format(
    "swe-smith",
    ("instance_id", "problem_statement", "patch", "FAIL_TO_PASS", "image_name"),
    read_smith,
    lambda row: not row.get("test_patch"),
)


_R2E_SETUP = """left="--exclude=./.venv --exclude=./r2e_tests --exclude=./run_tests.sh"
tar -C /testbed -cf - $left . | tar -xf - --no-same-owner
ln -sfn /testbed/.venv .venv"""
_R2E_COMMAND = """rm -rf .venv r2e_tests
ln -s /testbed/.venv .venv
cp -r /r2e_tests r2e_tests
sed 's#/testbed/##g' /testbed/run_tests.sh > .git/run_tests.sh
bash .git/run_tests.sh"""
"""A change may bring folders of these names: they are the image's when the tests run."""
_R2E_PATH = "/testbed/.venv/bin:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"


def read_r2e(row: Row, index: int) -> Task:
    """Returns a task of docker_image, expected_output_json and problem_statement.

    repo_name, commit_hash and parsed_commit_content are read where they are there.
    """
    expected = mapping(row["expected_output_json"], "expected_output_json")
    # A test's name without what the harness prints behind it.
    names = [
        name.split(" - ")[0].strip() for name, status in expected.items() if status == "PASSED"
    ]
    if not names:
        raise TaskError("expected_output_json has no test that passes", "at least one")
    data: dict[str, Json] = {
        "image": image_of(text(row, "docker_image")),
        "setup": _R2E_SETUP,
        "environment": {"PATH": _R2E_PATH, "PYTHONPATH": f"{WORKSPACE}/src:{WORKSPACE}"},
        "test_command": _R2E_COMMAND,
        "FAIL_TO_PASS": names,
        "PASS_TO_PASS": [],
    }
    if patch := _patch(row.get("parsed_commit_content")):
        data["patch"] = patch
    task_id = f"{row.get('repo_name') or 'r2e'}-{row.get('commit_hash') or index}"
    prompt = text(row, "problem_statement")
    return Task(task_id=task_id, env="swe", prompt=prompt, data=data, data_source="r2e-gym")


def _patch(commit: Json) -> str:
    """Returns the commit's changes but its tests, or "" without `parsed_commit_content`."""
    if not commit:
        return ""
    files = mapping(commit, "parsed_commit_content").get("file_diffs")
    diffs = []
    for change in files if isinstance(files, list) else []:
        path = change.get("header", {}).get("file", {}).get("path", "")
        is_test = any(part.startswith("test") for part in path.split("/")) or "_test." in path
        if path.endswith(".py") and not is_test:
            diffs.append(_diff(path, change))
    return "".join(diffs)


def _diff(path: str, change: dict[str, Json]) -> str:
    is_new = not change.get("old_file_content") and not change.get("minus_file")
    minus = "/dev/null" if is_new else f"a/{path}"
    mode = "new file mode 100644\n" if is_new else ""
    lines = [f"diff --git a/{path} b/{path}\n{mode}--- {minus}\n+++ b/{path}\n"]
    marks = {"context": " ", "added": "+", "deleted": "-"}
    for hunk in change.get("hunks", []):
        about = hunk["descriptor"]
        old, new = about["old_range"], about["new_range"]
        lines.append(f"@@ -{_range(old)} +{_range(new)} @@\n")
        for line in hunk["line_group"]["all_lines"]:
            if line["type"] in marks:
                lines.append(f"{marks[line['type']]}{line['content']}\n")
            else:
                lines.append("\\ No newline at end of file\n")
    return "".join(lines)


def _range(span: dict[str, Json]) -> str:
    length = span.get("length")
    return f"{span['start']}" if length is None else f"{span['start']},{length}"


R2E_GYM = Format("r2e-gym", ("docker_image", "expected_output_json", "problem_statement"), read_r2e)
