"""The lint of names: what it counts, and that it fails."""

from __future__ import annotations

import ast

from tests.names import Room, bindings, problems

SOURCE = """
def told(self, given, *, path):
    left = right = 0
    for one in path:
        self.num_held = [found for found in one]
    try: ...
    except OSError as gone: ...
class Said: pass
class NotFoundError: pass
lambda asked: asked
"""


def test_each_kind_of_binding_is_counted_and_operands_are_not() -> None:
    vague = {name for name, _, is_vague in bindings(ast.parse(SOURCE)) if is_vague}
    assert vague == {"told", "given", "one", "num_held", "found", "gone", "Said", "asked"}


def test_a_room_above_its_bound_and_a_class_of_two_files_fail() -> None:
    room = Room(num_names=1000, vague=["prorl/a.py:1 told"] * 6)
    twice = {"Job": ["prorl/a.py:1", "prorl/b.py:2"]}
    settings = {"code": 5, "tests": 8, "rooms": {}, "repeated_classes": []}
    lines = list(problems({"prorl": room, "tests": room}, twice, settings))
    assert [line.split(":")[0] for line in lines] == ["prorl", "class Job stands in prorl/a.py"]
    settings |= {"rooms": {"prorl": 6}, "repeated_classes": ["Job"]}
    assert not list(problems({"prorl": room, "tests": room}, twice, settings))
