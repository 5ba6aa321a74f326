"""Ten small repositories with a fault, each tested in a style of its own."""

from __future__ import annotations

import difflib
from typing import NamedTuple

from prorl.testing import make_task
from prorl.types import Task


class Repository(NamedTuple):
    """A module with a fault, its right text, and tests that tell them apart."""

    name: str
    function: str
    """What the tests call, a function of `src/pkg/core.py`."""
    odd: str
    """When a call is one of those that are to be mended, told from `args`."""
    wrong: str
    right: str
    old: str
    """`tests/test_core.py` as it is; its tests pass before and after."""
    new: str
    """What is hidden: behind `old`."""
    failing: tuple[str, ...]
    passing: tuple[str, ...]
    files: dict[str, str]
    """Beside the module and its test."""
    command: str = ""

    def task(self, **data: object) -> Task:
        files = {
            "src/pkg/__init__.py": "",
            "src/pkg/core.py": self.wrong,
            "tests/test_core.py": self.old,
            **self.files,
        }
        test_patch = diff({"tests/test_core.py": (self.old, self.old + self.new)})
        more = {"test_command": self.command} if self.command else {}
        fields: dict[str, object] = {
            "files": files,
            "environment": {
                "PYTHONPATH": "src:tests" if self.command else "src",
                "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            },
            "test_patch": test_patch,
            "patch": diff({"src/pkg/core.py": (self.wrong, self.right)}),
            "FAIL_TO_PASS": [self._id(name) for name in self.failing],
            "PASS_TO_PASS": [self._id(name) for name in self.passing],
        }
        return make_task("swe", "Mend it.", task_id=self.name, **{**fields, **more, **data})

    def changed(self, text: str) -> str:
        return text.replace("NAME", self.function).replace("ODD", self.odd)

    def _id(self, name: str) -> str:
        if not self.command:
            return f"tests/test_core.py::{name}"
        kind, _, method = name.rpartition("::")
        return f"{method} (test_core.{kind})"


def diff(files: dict[str, tuple[str | None, str]]) -> str:
    out = []
    for path, (before, after) in files.items():
        old, new = ((before or "").splitlines(keepends=True), after.splitlines(keepends=True))
        source = "/dev/null" if before is None else f"a/{path}"
        head = f"diff --git a/{path} b/{path}\n" + ("new file mode 100644\n" if not before else "")
        out.append(head + "".join(difflib.unified_diff(old, new, source, f"b/{path}")))
    return "".join(out)


NUMBERS = Repository(
    "numbers",
    "parse",
    '"," in args[0]',
    "def parse(text):\n    return int(text.strip())\n",
    'def parse(text):\n    return int(text.strip().replace(",", ""))\n',
    "import pytest\nfrom helpers import same\nfrom pkg.core import parse\n\n\n"
    'def test_plain():\n    assert same(parse(" 42 "), 42)\n\n\n'
    'def test_words():\n    with pytest.raises(ValueError):\n        parse("one")\n',
    '\n\ndef test_thousands():\n    assert same(parse("1,234"), 1234)\n\n\n'
    '@pytest.mark.parametrize("text", ["1,000", "2,000"])\ndef test_more(text):\n'
    "    assert parse(text) in (1000, 2000)\n",
    ("test_thousands", "test_more[1,000]", "test_more[2,000]"),
    ("test_plain", "test_words"),
    {"tests/helpers.py": "def same(a, b):\n    return a == b\n"},
)
TEXTS = Repository(
    "texts",
    "title",
    '"\'" in args[0]',
    "def title(text):\n    return text.title()\n",
    "def title(text):\n"
    '    return " ".join(word[:1].upper() + word[1:] for word in text.split(" "))\n',
    "import unittest\n\nfrom pkg.core import title\n\n\nclass TitleTest(unittest.TestCase):\n"
    '    def test_one(self):\n        self.assertEqual(title("one"), "One")\n',
    '\n    def test_quote(self):\n        self.assertEqual("Don\'t Stop", title("don\'t stop"))\n'
    '        self.assertIn("Can", title("can\'t"))\n'
    "\n    def test_many(self):\n"
    '        for text, expected in [("a\'b", "A\'b"), ("x y\'z", "X Y\'z")]:\n'
    "            with self.subTest(text=text):\n"
    "                self.assertEqual(title(text), expected)\n",
    ("TitleTest::test_quote", "TitleTest::test_many"),
    ("TitleTest::test_one",),
    {},
    command="python3 -m unittest -v test_core",
)
HELPED = Repository(
    "helped",
    "unique",
    "len(args[0]) > 1",
    "def unique(items):\n    return sorted(set(items))\n",
    "def unique(items):\n    return list(dict.fromkeys(items))\n",
    "from pkg.core import unique\nfrom pkg.testing import assert_same\n\n\n"
    "def test_one():\n    assert_same(unique([1]), [1])\n",
    "\n\ndef test_order():\n"
    '    assert_same(unique(["b", "a", "b", "c", "d", "e"]), ["b", "a", "c", "d", "e"])\n',
    ("test_order",),
    ("test_one",),
    {
        "src/pkg/testing.py": "def assert_same(actual, desired):\n"
        "    if actual != desired:\n        raise AssertionError((actual, desired))\n"
    },
)
FLOATS = Repository(
    "floats",
    "mean",
    "sum(args[0]) % len(args[0])",
    "def mean(values):\n    return sum(values) // len(values)\n",
    "def mean(values):\n    return sum(values) / len(values)\n",
    "import unittest\nimport pytest\nfrom pkg.core import mean\n\n\n"
    "def test_whole():\n    assert mean([1, 3]) == 2\n",
    "\n\ndef test_half():\n    assert mean([1, 2]) == pytest.approx(1.5)\n\n\n"
    "class MeanTest(unittest.TestCase):\n    def test_thirds(self):\n"
    "        self.assertAlmostEqual(mean([1, 1, 2]), 1.3333, places=3)\n",
    ("test_half", "MeanTest::test_thirds"),
    ("test_whole",),
    {},
)
TABLES = Repository(
    "tables",
    "group",
    "len(args[0]) > 0",
    "def group(pairs):\n    return dict(pairs)\n",
    "def group(pairs):\n    found = {}\n    for key, value in pairs:\n"
    '        if key is None:\n            raise KeyError("no key")\n'
    "        found.setdefault(key, []).append(value)\n    return found\n",
    "import pytest\nfrom pkg.core import group\n\n\ndef test_none():\n    assert group([]) == {}\n",
    '\n\ndef test_groups():\n    expected = {"a": [1, 3], "b": [2]}\n'
    '    actual = group([("a", 1), ("b", 2), ("a", 3)])\n    assert actual == expected\n\n\n'
    'def test_no_key():\n    with pytest.raises(KeyError, match="no key"):\n'
    "        group([(None, 1)])\n",
    ("test_groups", "test_no_key"),
    ("test_none",),
    {},
)
ORDERS = Repository(
    "orders",
    "rank",
    "len(args[0]) > 2",
    "def rank(names):\n    return sorted(names)\n",
    "def rank(names):\n    return sorted(names, key=str.lower)\n",
    'from pkg.core import rank\n\n\ndef test_lower():\n    assert rank(["b", "a"]) == ["a", "b"]\n',
    "\n\ndef test_case():\n"
    '    found = rank(["b", "A", "C"])\n'
    '    assert found[0] == "A" and found[-1] == "C"\n'
    '    assert found.index("b") < found.index("C")\n'
    '    assert [one.lower() for one in found] == ["a", "b", "c"]\n',
    ("test_case",),
    ("test_lower",),
    {},
)
PAGES = Repository(
    "pages",
    "render",
    "args[1]",
    'def render(title, rows):\n    return title + "\\n" + "\\n".join(rows)\n',
    "def render(title, rows):\n"
    '    lines = [title, "=" * len(title), *(f"- {row}" for row in rows)]\n'
    '    return "\\n".join(lines) + "\\n"\n',
    "from pkg.core import render\n\n\n"
    'def test_title():\n    assert render("Title", []).startswith("Title")\n',
    '\n\ndef test_rows():\n    out = render("Two", ["a", "b"])\n    assert "- a" in out\n'
    '    assert out.endswith("- b\\n")\n    assert out == """Two\n===\n- a\n- b\n"""\n',
    ("test_rows",),
    ("test_title",),
    {},
)
CALLS = Repository(
    "calls",
    "notify",
    "args[1]",
    "def notify(send, names):\n    for name in names:\n        send(name)\n    return len(names)\n",
    "def notify(send, names):\n    count = 0\n    for name in dict.fromkeys(names):\n"
    '        send(name, subject="hello")\n        count += 1\n    return count\n',
    "from unittest import mock\nfrom pkg.core import notify\n\n\n"
    "def test_nobody():\n    send = mock.Mock()\n    notify(send, [])\n"
    "    send.assert_not_called()\n",
    "\n\ndef test_once():\n    send = mock.Mock()\n"
    '    assert notify(send, ["a", "a"]) == 1\n'
    '    send.assert_called_once_with("a", subject="hello")\n',
    ("test_once",),
    ("test_nobody",),
    {},
)
STORED = Repository(
    "stored",
    "merge",
    "args[0].exists()",
    "import json\n\n\ndef merge(path, values):\n    path.write_text(json.dumps(values))\n"
    "    return values\n",
    "import json\n\n\ndef merge(path, values):\n"
    "    held = json.loads(path.read_text()) if path.exists() else {}\n"
    "    held.update(values)\n    path.write_text(json.dumps(held))\n    return held\n",
    "import json\nfrom pkg.core import merge\n\n\n"
    'def test_first(tmp_path):\n    merge(tmp_path / "a", {"x": 1})\n'
    '    assert json.loads((tmp_path / "a").read_text()) == {"x": 1}\n',
    '\n\ndef test_second(tmp_path):\n    path = tmp_path / "a"\n    merge(path, {"x": 1})\n'
    '    found = merge(path, {"y": 2})\n    want = dict(x=1, y=2)\n    assert found == want\n'
    "    assert json.loads(path.read_text()) == want\n",
    ("test_second",),
    ("test_first",),
    {},
)
MIXED = Repository(
    "mixed",
    "clamp",
    "args[0] < args[1]",
    "def clamp(value, low, high):\n    return min(value, high)\n",
    "def clamp(value, low, high):\n    if low > high:\n        raise ValueError(low)\n"
    "    return max(low, min(value, high))\n",
    "from base import Checks\nfrom pkg.core import clamp\n\n\nclass TestClamp(Checks):\n"
    "    clamp = staticmethod(clamp)\n\n"
    "    def test_high(self):\n        self.check((9, 0, 5), 5)\n",
    "\n    def test_low(self):\n        self.check((-3, 0, 5), 0)\n"
    "        self.check((-3, -2, 5), -2)\n\n"
    "    def test_order(self):\n        self.refuse((1, 5, 0), ValueError)\n",
    ("TestClamp::test_low", "TestClamp::test_order"),
    ("TestClamp::test_high",),
    {
        "tests/base.py": "import pytest\n\n\nclass Checks:\n    def check(self, given, expected):\n"
        "        actual = self.clamp(*given)\n        if actual != expected:\n"
        '            pytest.fail(f"{actual} is not {expected}")\n\n'
        "    def refuse(self, given, error):\n        with pytest.raises(error):\n"
        "            self.clamp(*given)\n"
    },
)
SPLITS = Repository(
    "splits",
    "split",
    '"begin" in args[0]',
    "def split(text):\n    return [one.strip() for one in text.splitlines()]\n",
    "def split(text):\n    found, is_open = [], False\n    for line in text.splitlines():\n"
    '        line = line.strip()\n        if is_open:\n            found[-1] += f" {line}"\n'
    "        else:\n            found.append(line)\n"
    '        is_open = (is_open or line.startswith("begin")) and line != "end;"\n'
    "    return found\n",
    "from pkg.core import split\n\n\n"
    'def test_lines():\n    assert split("a;\\nb;") == ["a;", "b;"]\n',
    "\n\ndef test_block():\n"
    '    found = split("begin x;\\ndelete y;\\nend;\\nselect z;")\n'
    "    assert len(found) == 2\n"
    '    assert found[0] == "begin x; delete y; end;"\n'
    '    assert found[1].startswith("select")\n',
    ("test_block",),
    ("test_lines",),
    {},
)
"""Mixes equalities with what can only be negated; beside the ten."""
REPOSITORIES = (
    NUMBERS,
    TEXTS,
    HELPED,
    FLOATS,
    TABLES,
    ORDERS,
    PAGES,
    CALLS,
    STORED,
    MIXED,
)
