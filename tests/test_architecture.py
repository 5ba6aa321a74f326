"""Rules of house style that can be checked by reading: broad catches, unbounded queues, where the
environment is read.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("prorl", "stages", "storage", "trainer")
FILES = sorted(
    path
    for folder in FOLDERS
    for path in (ROOT / folder).rglob("*.py")
    if not any(p.is_symlink() for p in path.parents if p != ROOT)
)


@cache
def trees() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text()) for path in FILES}


BY_BYTES = Path("prorl/flight/queues.py")
"""Its queues are bounded by bytes."""

QUEUES = ("Queue", "SimpleQueue", "LifoQueue", "PriorityQueue")


def test_a_module_says_what_it_owns() -> None:
    assert not [
        str(path) for path, tree in trees().items() if tree.body and not ast.get_docstring(tree)
    ]


REFERENCES = {
    "file": re.compile(r"`((?:\w+/)*\w+\.py)`"),
    "module": re.compile(r"python -m (prorl[\w.]*)"),
    "time": re.compile(r"`([A-Z]+(?:_[A-Z]+)*_S)`"),
    "member": re.compile(r"`([A-Z]\w+\.\w+)`"),
}
OF_OTHERS = ("prorl/bench/dapo_model.py", "prorl/envs/swe/guard.py")
"""Modules whose docstrings name files of other projects."""
PLAIN_CLASS = re.compile(r"^class (\w+):\n((?: .*\n|\n)+)", re.M)


def test_docstrings_name_what_exists() -> None:
    """Files, `python -m`, times (`NAME_S`) and members of classes without a base: a rename must not
    leave its old name behind.
    """
    sources = {path: path.read_text() for path in FILES}
    everything = "\n".join(sources.values())
    lines = re.findall(r"^ *((?:\w+, )*\w+_S)(?:: \w+)?(?:,| =)", everything, re.M)
    times = {name for line in lines for name in line.split(", ")}
    classes = dict(PLAIN_CLASS.findall(everything))

    def is_there(kind: str, name: str) -> bool:
        if kind == "file":
            ours = any(str(path).endswith(f"/{name}") for path in FILES)
            return ours or (ROOT / name).exists() or "NAME" in name
        if kind == "module":
            path = ROOT / name.replace(".", "/")
            return path.with_suffix(".py").exists() or (path / "__main__.py").exists()
        if kind == "time":
            return name in times
        class_name, member = name.split(".")
        body = classes.get(class_name)
        return body is None or bool(re.search(rf"(def |self\.|^ +){member}\b", body, re.M))

    missing = [
        f"{path.relative_to(ROOT)}: {name}"
        for path, source in sources.items()
        if str(path.relative_to(ROOT)) not in OF_OTHERS
        for text in re.findall(r'"""(.*?)"""', source, re.DOTALL)
        for kind, pattern in REFERENCES.items()
        for name in pattern.findall(text)
        if not is_there(kind, name)
    ]
    assert not missing, "\n".join(missing)


def test_queues_are_bounded() -> None:
    unbounded = [
        f"{path}:{node.lineno}"
        for path, tree in trees().items()
        if path != ROOT / BY_BYTES
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and getattr(node.func, "id", getattr(node.func, "attr", "")) in QUEUES
        and not (node.args or node.keywords)
    ]
    assert not unbounded, f"unbounded: {unbounded}"


def test_broad_catches_live_in_boundary_only() -> None:
    """Apart: what runs inside a sandbox (no prorl to import there), and a process's main, which
    logs its last words.
    """
    broad = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ExceptHandler)
        and isinstance(node.type, ast.Name)
        and node.type.id in ("Exception", "BaseException")
        if path.name != "errors.py"
        and path.parent.name != "server"
        and path.name not in ("code_tests.py", "child.py", "__main__.py")
        and not any(isinstance(inner, ast.Raise) and inner.exc is None for inner in ast.walk(node))
    ]
    assert not broad, f"use prorl.errors.boundary: {broad}"


@pytest.fixture(scope="module")
def imports() -> grimp.ImportGraph:
    """Every import, also those that only a type checker reads: the contracts leave these out, since
    they cost no start of a process. The face of the package, which imports lazily, is left out.
    """
    graph = grimp.build_graph("prorl", cache_dir=None)
    for module in graph.find_modules_directly_imported_by("prorl"):
        graph.remove_import(importer="prorl", imported=module)
    return graph


def test_no_modules_import_each_other_in_a_circle(imports: grimp.ImportGraph) -> None:
    imported = {
        module: imports.find_modules_directly_imported_by(module) for module in imports.modules
    }
    try:
        TopologicalSorter(imported).prepare()
    except CycleError as error:
        pytest.fail(f"a circle of imports: {' <- '.join(error.args[1])}")


def test_imports_for_types_point_down_too(imports: grimp.ImportGraph) -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    upward = [
        f"{importer} -> {imported}"
        for contract in contracts["contracts"]
        if contract["type"] == "layers"
        for package in contract["containers"]
        for importer, imported in _upward(imports, package, contract["layers"])
    ]
    assert not upward


def _upward(graph: grimp.ImportGraph, package: str, layers: list[str]) -> Iterator[tuple[str, str]]:
    """Imports from a layer to one above it, or to another room of the same layer,
    unless its rooms are joined by `:`.
    """
    floors = {
        f"{package}.{room.strip()}": floor
        for floor, rooms in enumerate(layers)
        for room in re.split(r"[|:]", rooms)
    }

    def room_of(module: str) -> str:
        return ".".join(module.split(".")[: package.count(".") + 2])

    for importer in graph.modules:
        for imported in graph.find_modules_directly_imported_by(importer):
            rooms = room_of(importer), room_of(imported)
            if rooms[0] == rooms[1] or not {*rooms} <= floors.keys():
                continue
            floor = floors[rooms[0]]
            may_share = ":" in layers[floor]
            if floor > floors[rooms[1]] or (floor == floors[rooms[1]] and not may_share):
                yield importer, imported


STATE = ROOT / "prorl/service/core/state.py"

WRITERS = {
    "WorkerRecord": "rollouts.py",
    "WorkerStatus": "workers.py",
    "StoredRow": "commits.py",
    "RolloutRecord": "rollouts.py",
    "GroupMembers": "rollouts.py",
    "GroupOutcome": "groups.py",
    "GroupRecord": "",
    "RunLife": "runs.py",
    "RunAccepted": "accept.py",
    "RunProgress": "rollouts.py",
    "RunDecisions": "groups.py",
    "RunCommits": "commits.py",
    "RunOutbox": "changes.py",
    "RunDataset": "dataset.py",
    "RunQueues": "",
    "RunDelivery": "groups.py",
    "RunPace": "groups.py",
    "RunWeightsState": "versions.py",
    "RunGrants": "grants.py",
    "RunWatch": "watchdog.py",
    "RunRecord": "",
}
"""By record of the gateway's state: the one module of `prorl/service` that changes it once it was
made; empty where only its own methods do.
"""

CHANGES = frozenset(
    {"add", "append", "appendleft", "clear", "discard", "extend", "extendleft", "pop", "popleft"}
    | {"remove", "setdefault", "subtract", "update"}
)
"""Methods of containers that change them."""


def _changed(node: ast.AST) -> Iterator[ast.Attribute]:
    """Attributes that a node assigns, deletes, or changes as containers."""
    targets: list[ast.expr] = []
    match node:
        case ast.Assign(targets=several) | ast.Delete(targets=several):
            targets = list(several)
        case ast.AugAssign(target=target) | ast.AnnAssign(target=target):
            targets = [target]
        case ast.Call(func=ast.Attribute(value=container, attr=method)) if method in CHANGES:
            targets = [container]
    while targets:
        match targets.pop():
            case ast.Tuple(elts=elements) | ast.List(elts=elements):
                targets += elements
            case ast.Subscript(value=value) | ast.Starred(value=value):
                targets.append(value)
            case ast.Attribute() as attribute:
                yield attribute


def _name(node: ast.expr) -> str:
    return getattr(node, "attr", getattr(node, "id", ""))


CONTAINERS = ("dict", "list", "deque", "Counter", "OrderedSet")


def _records() -> tuple[dict[str, set[str]], dict[str, str], dict[str, str]]:
    """Fields of each record of the state; by the field that has it, the name of each piece; and by
    field what whole records can have changed: of frozen ones only their containers.
    """
    classes = [node for node in trees()[STATE].body if isinstance(node, ast.ClassDef)]
    records = {
        node.name: {
            _name(line.target): ast.unparse(line.annotation)
            for line in node.body
            if isinstance(line, ast.AnnAssign)
        }
        for node in classes
        if node.decorator_list
    }
    frozen = {node.name for node in classes if "frozen=True" in map(ast.unparse, _options(node))}
    pieces: dict[str, str] = {}
    changeable: dict[str, str] = {}
    for name, fields in records.items():
        for field, kind in fields.items():
            if kind in records and not kind.endswith("Record"):
                pieces[field] = kind
            elif name.endswith("Record") and (name not in frozen or kind.startswith(CONTAINERS)):
                changeable[field] = name
    return {name: set(fields) for name, fields in records.items()}, pieces, changeable


def _options(node: ast.ClassDef) -> Iterator[ast.keyword]:
    for decorator in node.decorator_list:
        if isinstance(decorator, ast.Call):
            yield from decorator.keywords


def test_each_record_of_the_state_has_a_single_writer() -> None:
    """`run.delivery.kept += 1` changes what `delivery` is; `worker.in_flight.add(...)` a field that
    has this name in one of the whole records, whatever the variable is called.
    """
    fields, pieces, changeable = _records()
    assert fields.keys() == WRITERS.keys()
    writers: dict[str, set[str]] = {name: set() for name in WRITERS}
    for path, tree in trees().items():
        if ROOT / "prorl/service" not in path.parents or path == STATE:
            continue
        for attribute in (changed for node in ast.walk(tree) for changed in _changed(node)):
            holder, field = _name(attribute.value), attribute.attr
            if holder in pieces and field in fields[pieces[holder]]:
                writers[pieces[holder]].add(path.name)
            elif holder and holder != "self" and holder not in pieces and field in changeable:
                writers[changeable[field]].add(path.name)
    assert writers == {name: {module} - {""} for name, module in WRITERS.items()}
