"""A Dockerfile as an Apptainer definition, for building images without Docker.

Read are FROM, RUN, COPY and ADD of local files, ENV, ARG, WORKDIR, and USER root; what only says
how a container is run (CMD, EXPOSE ...) is left out. FROM is a name of the registry, `/` and `:`
written `_`: an image that somebody has put there. The last WORKDIR, or the base's, is kept in the
image as WORKDIR_FILE. What a RUN fetches must be reachable from here.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from prorl.errors import UserError

PLACES = ("environment/Dockerfile", "Dockerfile")
CONTEXT = "/.prorl-context"
WORKDIR_FILE = "/.prorl-workdir"
IGNORED = frozenset(
    ["CMD", "ENTRYPOINT", "EXPOSE", "LABEL", "HEALTHCHECK", "MAINTAINER", "VOLUME", "STOPSIGNAL"]
)
COPY = """copy() {
  last="${*: -1}"
  for each in "${@:1:$#-1}"; do
    if [ -d "$each" ]; then mkdir -p "$last" && cp -a "$each/." "$last/"
    elif [ $# -gt 2 ] || [ -d "$last" ] || [ "${last: -1}" = / ]; then
      mkdir -p "$last" && cp -a "$each" "$last/"
    else mkdir -p "$(dirname "$last")" && cp -a "$each" "$last"; fi
  done
}
"""
_PAIR = re.compile(r"""\w+=(?:"(?:\\.|[^"\\])*"|'[^']*'|[^\s"'])*""")
_STEP = re.compile(r"^\s*([A-Za-z]+)\s+(.*)$", re.DOTALL)


class Step(NamedTuple):
    """One instruction of a Dockerfile."""

    word: str
    rest: str


def find(folder: str) -> Path | None:
    """The Dockerfile of a task's or a build's folder."""
    return next((path for name in PLACES if (path := Path(folder) / name).is_file()), None)


def image_name(base: str) -> str:
    """The registry's name of a base image.

    >>> image_name("python:3.13-slim"), image_name("ghcr.io/a/b/ubuntu:1")
    ('python_3.13-slim', 'ubuntu_1')
    """
    last = base.rpartition("/")[2].partition("@")[0].removesuffix(":latest")
    return re.sub(r"[^A-Za-z0-9._-]", "_", last)


def steps(text: str) -> Iterator[Step]:
    """Instructions in their order, lines joined, comments left out."""
    waiting = ""
    for line in text.splitlines():
        if line.lstrip().startswith("#") or (waiting and not line.strip()):
            continue
        waiting += line
        if waiting.rstrip().endswith("\\"):
            waiting = waiting.rstrip()[:-1]
            continue
        if found := _STEP.match(waiting):
            yield Step(found[1].upper(), found[2].strip())
        waiting = ""


def base_of(text: str) -> str:
    """What FROM names. Raises UserError for none, or more than one."""
    found = [step.rest for step in steps(text) if step.word == "FROM"]
    if len(found) != 1:
        raise UserError(f"a Dockerfile with {len(found)} FROM", "one: no stages")
    words = [word for word in found[0].split() if not word.startswith("--")]
    return words[0]


def definition(path: Path, base: str) -> str:
    """The definition file on top of a base image's folder. Raises UserError."""
    inherited = Path(base + WORKDIR_FILE)
    workdir = inherited.read_text().strip() if inherited.is_file() else "/"
    environment, post = _translated(path, workdir)
    script = "/.prorl-post.sh"
    return "\n".join(
        [
            f"Bootstrap: localimage\nFrom: {base}\n\n%files",
            f"    {path.parent} {CONTEXT}",
            "\n%environment",
            *(f"    {line}" for line in environment),
            "\n%post",
            f"    cat > {script} <<'PRORL_END_OF_POST'",
            *post,
            "PRORL_END_OF_POST",
            f"    bash {script} && rm {script}",
            "",
        ]
    )


def _translated(path: Path, workdir: str) -> tuple[list[str], list[str]]:
    """(lines of the environment, lines of the script) that a Dockerfile's steps are."""
    environment: list[str] = []
    post = ["set -e", COPY, "cd /"]
    for step in steps(path.read_text()):
        if step.word == "WORKDIR":
            below = f"{workdir.rstrip('/')}/{step.rest}"
            workdir = step.rest if step.rest.startswith("/") else below
            post.append(f"mkdir -p {shlex.quote(workdir)} && cd {shlex.quote(workdir)}")
        elif step.word in ("ENV", "ARG"):
            lines = _exports(step)
            post += lines
            environment += lines if step.word == "ENV" else []
        elif step.word == "RUN":
            post += [f"cd {shlex.quote(workdir)}", _command(step.rest)]
        elif step.word in ("COPY", "ADD"):
            post.append(_copy(step, workdir))
        elif step.word not in IGNORED | {"FROM"} and step != Step("USER", "root"):
            raise UserError(f"{path}: {step.word} {step.rest[:60]}", "no such instruction")
    post.append(f"echo {shlex.quote(workdir)} > {WORKDIR_FILE}; rm -rf {CONTEXT}")
    return environment, post


def _exports(step: Step) -> list[str]:
    """`ENV a=b c="d e"`, or `ENV a b c`."""
    if re.match(r"^\w+=", step.rest):
        return [f"export {pair}" for pair in _PAIR.findall(step.rest)]
    name, _, value = step.rest.partition(" ")
    return [f"export {name}={shlex.quote(value.strip())}"] if value else []


def _command(rest: str) -> str:
    if "<<" in rest:
        raise UserError(f"RUN {rest[:60]}", "no here-document")
    rest = re.sub(r"^(?:--\S+\s+)+", "", rest)
    return shlex.join(json.loads(rest)) if rest.startswith("[") else f"( {rest}\n)"


def _copy(step: Step, workdir: str) -> str:
    words = json.loads(step.rest) if step.rest.startswith("[") else shlex.split(step.rest)
    if any(word.startswith("--from") or "://" in word for word in words):
        raise UserError(f"{step.word} {step.rest[:60]}", "files of the Dockerfile's own folder")
    words = [word for word in words if not word.startswith("--")]
    target = words[-1] if words[-1].startswith("/") else f"{workdir.rstrip('/')}/{words[-1]}"
    sources = [f"{CONTEXT}/{word.removeprefix('./').lstrip('/')}" for word in words[:-1]]
    shown = [word if "*" in word else shlex.quote(word) for word in sources]
    return f"copy {' '.join(shown)} {shlex.quote(target)}"
