"""Multi-SWE-bench and Multi-SWE-RL: pull requests in several languages.

Zan et al. 2025, github.com/multi-swe-bench. The producer's image
`mswebench/ORG_m_REPO:pr-NUMBER` holds the repository in /home/REPO and what runs its tests in
/home/run.sh. Names of tests are as the language's runner prints them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from prorl.errors import TaskError
from prorl.tasks.formats import Format, Row, text
from prorl.tasks.formats.swebench import image_of
from prorl.types import Json, Task

PARSERS: Mapping[str, str] = {
    "go": "go",
    "rust": "cargo",
    "java": "maven",
    "javascript": "jest",
    "js": "jest",
    "typescript": "jest",
    "ts": "jest",
    "python": "python",
    "c": "ctest",
    "c++": "ctest",
    "cpp": "ctest",
}
BECOMES_GOOD = ("f2p_tests", "s2p_tests", "n2p_tests")


def read(row: Row, index: int) -> Task:
    """A task of org, repo, number, fix_patch, test_patch, f2p_tests and p2p_tests.

    title, body, resolved_issues and lang are read where they are there.
    """
    org, repo, number = text(row, "org"), text(row, "repo"), row["number"]
    return Task(
        task_id=str(row.get("instance_id") or f"{org}__{repo}-{number}"),
        env="swe",
        prompt=_prompt(row),
        data=_data(row, f"mswebench/{org}_m_{repo}:pr-{number}".lower(), repo),
        data_source="multi-swe",
    )


def _data(row: Row, image: str, repo: str) -> dict[str, Json]:
    good = [name for key in BECOMES_GOOD for name in _names(row, key)]
    if not good:
        raise TaskError("f2p_tests, s2p_tests and n2p_tests name no test", "at least one")
    language = str(row.get("lang") or row.get("language") or "").lower()
    data: dict[str, Json] = {
        "image": image_of(image),
        "setup": f"cp -a /home/{repo}/. .",
        "test_command": f'sed "s#/home/{repo}#$PWD#g" /home/run.sh | bash',
        "patch": text(row, "fix_patch"),
        "test_patch": text(row, "test_patch"),
        "FAIL_TO_PASS": sorted(set(good)),
        "PASS_TO_PASS": sorted(set(_names(row, "p2p_tests"))),
    }
    if parser := PARSERS.get(language):
        data["log_parser"] = parser
    return data


def _names(row: Row, key: str) -> list[str]:
    """Names of tests: the keys of an object, a list, or JSON text of one."""
    value = row.get(key) or []
    try:
        value = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        value = None
    if isinstance(value, dict):  # as a column of Parquet every row has every key
        return [name for name, said in value.items() if said is not None]
    if not isinstance(value, list):
        raise TaskError(f"{key!r} is {str(row[key])[:60]}", "an object, or a list of names")
    return [str(one.get("name")) if isinstance(one, dict) else str(one) for one in value]


def _prompt(row: Row) -> str:
    """The issues that the pull request resolves, else its own words. Raises TaskError."""
    issues = row.get("resolved_issues")
    told = [one for one in issues if isinstance(one, dict)] if isinstance(issues, list) else []
    parts = [f"{one.get('title') or ''}\n\n{one.get('body') or ''}".strip() for one in told]
    said = "\n\n".join(filter(None, parts)) or str(row.get("problem_statement") or "").strip()
    return said or f"{text(row, 'title')}\n\n{row.get('body') or ''}".strip()


FORMAT = Format(
    "multi-swe",
    ("org", "repo", "number", "fix_patch", "test_patch", "f2p_tests|s2p_tests|n2p_tests"),
    read,
)
