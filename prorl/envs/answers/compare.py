r"""Decides whether two trees of `parse.py` mean the same.

The reference decides what counts: order in a tuple, not in a set; both bounds of an interval;
every value of `\pm`.

Nothing is guessed: what has no rule here is not the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from prorl.envs.answers.evaluate import UndefinedError, equal, proportional, symbols
from prorl.envs.answers.measures import PERCENT, fits, ratio, unit_text
from prorl.envs.answers.notation import UnreadableError
from prorl.envs.answers.parse import Node
from prorl.envs.answers.sets import real_set, same_set

_HUNDRED = Node("num", value=Fraction(100))
_MAX_ITEMS = 40


def same(reference: Node, answer: Node) -> bool:
    """Returns whether the answer is the reference. Raises UnreadableError if one has none."""
    reference, reference_unit = _measured(reference)
    answer, answer_unit = _measured(answer)
    if PERCENT in (reference_unit, answer_unit):
        return _same_share(reference, reference_unit, answer, answer_unit)
    if not fits(reference_unit, answer_unit):
        return False
    factor = ratio(reference_unit, answer_unit)
    if factor is None:
        return False
    if factor != 1:
        answer = Node("*", (answer, Node("num", value=factor)))
    return _same_value(reference, answer)


def _measured(node: Node) -> tuple[Node, str]:
    """Returns (measured tree, its unit); the unit behind an equation is its right side's."""
    if node.op == "unit":
        return node.args[0], unit_text(node.name)
    if node.op == "relation" and node.args[-1].op == "unit":
        last = node.args[-1]
        return node._replace(args=(*node.args[:-1], last.args[0])), unit_text(last.name)
    return node, ""


def _same_share(reference: Node, reference_unit: str, answer: Node, answer_unit: str) -> bool:
    """25 % is 25 %, 0.25 and, where percents were asked for, 25; 25 is not 25 %."""
    if reference_unit == answer_unit:
        return _same_value(reference, answer)
    if reference_unit == PERCENT and not answer_unit:
        return _same_value(reference, answer) or _same_value(
            reference, Node("*", (answer, _HUNDRED))
        )
    if reference_unit or (reference.op == "num" and abs(reference.value) > 1):
        return False  # nobody says 1800 % for 18
    return _same_value(reference, Node("/", (answer, _HUNDRED)))


def _same_value(reference: Node, answer: Node) -> bool:
    reference, answer = _expanded(reference), _expanded(answer)
    if answer.op == "relation" and answer.name == "=" and answer.args[1].op == "sequence":
        names = answer.args[0].args or answer.args[:1]
        # (x, y) = (1, 2)
        texts = [name.name for name in names]
        is_named = texts == sorted(texts) and texts not in (["x"], ["y"], ["z"])
        is_named &= answer.args[0].op not in ("∪", "∩", "∖") and all(map(is_name, names))
        answer = answer.args[1] if is_named else answer
    if reference.op == "matrix" or answer.op == "matrix":
        return _same_matrix(reference, answer)
    if reference.op == "relation":
        return _same_relation(reference, answer)
    if reference.op in ("sequence", "list"):
        return _same_sequence(reference, answer)
    if _is_set(reference) or _is_set(answer):
        return _same_set(reference, answer)
    if reference.op == "ratio":
        return _same_ratio(reference, answer)
    return _same_scalar(reference, answer)


# ---- expressions


def _same_scalar(reference: Node, answer: Node) -> bool:
    if answer.op == "relation":
        value = assigned(answer)
        return value is not None and _same_scalar(reference, value)
    if answer.op in ("sequence", "list"):
        alone = len(answer.args) == 1 and answer.name == "⦃⦄"
        return alone and _same_scalar(reference, answer.args[0])
    if answer.op == "ratio":
        is_part = reference.op != "num" or reference.value.denominator != 1
        return is_part and len(answer.args) == 2 and equal(reference, Node("/", answer.args))
    if answer.op == "unit":
        return same(reference, answer)
    return equal(reference, answer)


def assigned(node: Node) -> Node | None:
    """Returns the value that an equation gives to its name: of `x = 5`, `f(x) = 5`, `2 * 3 = 6`;
    None if it gives none.

    >>> from prorl.envs.answers.parse import parse
    >>> assigned(parse("x = 5")).value, assigned(parse("5 = x")).value, assigned(parse("4 = 5"))
    (Fraction(5, 1), Fraction(5, 1), None)
    """
    if set(node.name) - {"=", "≈"}:
        return None
    *others, last = node.args
    if len(node.args) == 2 and is_name(last) and not symbols(others[0]):
        others, last = [last], others[0]
    if is_name(others[0]) and not (others[0].op == "sym" and others[0].name in symbols(last)):
        others = others[1:]
    for other in others:
        try:
            if other == last or not equal(other, last):
                return None
        except UnreadableError:
            return None
    return last


def is_name(node: Node) -> bool:
    """Returns whether a tree is a name for a value: `x`, `f(x)`, `AB`."""
    if node.op == "sym":
        return bool(symbols(node)) and not node.name.startswith("\\")
    if node.op == "call":
        return all(map(is_name, node.args))
    if node.op == "*" and all(part.op in ("sym", "*") for part in node.args):
        first = node.args[0]
        return all(map(is_name, node.args)) and (
            first.name in tuple("fghPFGTVSpq") or all(name.isupper() for name in symbols(node))
        )
    return False


def _same_ratio(reference: Node, answer: Node) -> bool:
    if answer.op == "ratio":
        if len(answer.args) != len(reference.args):
            return False
        firsts = reference.args[0], answer.args[0]
        return all(
            equal(Node("*", (left, firsts[1])), Node("*", (right, firsts[0])))
            for left, right in zip(reference.args, answer.args, strict=True)
        )
    return len(reference.args) == 2 and _same_scalar(Node("/", reference.args), answer)


def _expanded(node: Node) -> Node:
    """Returns the answer with a list of both signs in the place of `±`."""
    is_whole = node.op == "list" or node.name == "⦃⦄"
    items = node.args if is_whole else (node,)
    alternatives: list[Node] = []
    for item in items:
        alternatives += [item] if not _has_sign(item) else [_chosen(item, sign) for sign in "+-"]
        if len(alternatives) > _MAX_ITEMS:
            raise UnreadableError("too many values")
    if is_whole:
        return node._replace(args=tuple(alternatives))
    return (
        alternatives[0] if len(alternatives) == 1 else Node("list", tuple(alternatives), name="or")
    )


def _has_sign(node: Node) -> bool:
    return node.op in ("±", "∓") or any(map(_has_sign, node.args))


def _chosen(node: Node, sign: str) -> Node:
    args = tuple(_chosen(arg, sign) for arg in node.args)
    if node.op in ("±", "∓"):
        return Node("+" if (node.op == "±") == (sign == "+") else "-", args)
    return node._replace(args=args)


# ---- several values


def _same_sequence(reference: Node, answer: Node) -> bool:
    """Tuples in order; sets and lists in any; two numbers in brackets also as an interval."""
    if reference.op == "list" and all(item.op == "relation" for item in reference.args):
        return _same_conditions(reference, answer)
    if reference.name in ("[]", "[)", "(]", "][", "[[", "]]") and len(reference.args) == 2:
        if answer.op == "sequence" and answer.name == reference.name and len(answer.args) == 2:
            return _all_same(reference.args, answer.args)
        return _same_set(reference, answer)
    if reference.op == "sequence" and reference.name != "⦃⦄":
        return _same_tuple(reference, answer)
    items = _items(answer)
    if reference.name == answer.name == "⦃⦄":
        return _unordered(_distinct(reference.args), _distinct(answer.args))
    if answer.op == "sequence" and answer.name != "⦃⦄":
        # a pair in brackets is rather a point or an interval, unless it is written alike
        if answer.name == "()" and reference.op == "list":
            return len(items) > 1 and _all_same(_items(reference), items)
        return answer.name == "[]" and len(items) > 2 and _unordered(_items(reference), items)
    if _is_set(answer) and answer.op not in ("sequence", "list"):
        return _same_set(reference, answer)
    return _unordered(_items(reference), items)


def _same_tuple(reference: Node, answer: Node) -> bool:
    """Returns whether an answer has a tuple's items in order; a pair may also be an interval as a
    set.
    """
    is_interval = answer.op != "sequence" or answer.name == "]["
    if answer.op == "list" and (answer.name == "or" or len(_names_of(answer)) == 1):
        return False  # one value or another
    if answer.op == "relation" or (_is_set(answer) and is_interval):
        return len(reference.args) == 2 and _same_set(reference, answer)
    ordered = answer.op == "list" or answer.name == reference.name
    long = len(reference.args) > 2 and answer.name in ("()", "[]")
    return (ordered or long) and _all_same(reference.args, _items(answer))


def _names_of(node: Node) -> frozenset[str]:
    """The names of values in a list of equations."""
    equations = (item for item in node.args if item.op == "relation" and set(item.name) <= {"="})
    return frozenset(item.args[0].name for item in equations)


def _items(node: Node) -> tuple[Node, ...]:
    """The values of a list, set or tuple, without what names them; of `x=1, y=2` by name."""
    if node.op not in ("sequence", "list"):
        value = assigned(node) if node.op == "relation" else node
        return (value,) if value is not None else ()
    if node.args and all(item.op == "relation" for item in node.args):
        pairs = [(item.args[0].name, assigned(item)) for item in node.args]
        if any(value is None for _, value in pairs):
            return ()
        if len({name for name, _ in pairs}) == len(pairs):
            pairs.sort(key=lambda pair: pair[0])
        return tuple(value for _, value in pairs if value is not None)
    first = node.args[0] if node.args else None
    if first is not None and first.op == "relation" and node.op == "list":
        # `x = 3, -3`
        value = assigned(first)
        return (value, *node.args[1:]) if value is not None else ()
    return node.args


def _all_same(left: Sequence[Node], right: Sequence[Node]) -> bool:
    return len(left) == len(right) and all(map(same, left, right))


def _unordered(left: Sequence[Node], right: Sequence[Node]) -> bool:
    if len(left) != len(right) or len(left) > _MAX_ITEMS:
        return False
    braced = [
        any(node.op == "sequence" and node.name == "⦃⦄" for node in side) for side in (left, right)
    ]
    if braced[0] != braced[1]:
        return False
    rest = list(right)
    for item in left:
        place = next((index for index, other in enumerate(rest) if _is_same(item, other)), None)
        if place is None:
            return False
        del rest[place]
    return True


def _distinct(items: Sequence[Node]) -> list[Node]:
    """Returns a set's items, each once."""
    distinct: list[Node] = []
    for item in items[:_MAX_ITEMS]:
        if not any(_is_same(kept, item) for kept in distinct):
            distinct.append(item)
    return distinct if len(items) <= _MAX_ITEMS else list(items)


def _is_same(left: Node, right: Node) -> bool:
    try:
        return same(left, right)
    except (UnreadableError, UndefinedError):
        return False


def _same_conditions(reference: Node, answer: Node) -> bool:
    """`x=1, y=2` against the same, a tuple in the order of the names; else sets."""
    if any(set(item.name) - {"="} for item in reference.args):
        return _same_set(reference, answer)
    names = [item.args[0].name for item in reference.args]
    distinct = len(set(names)) == len(names)
    if distinct and answer.name == "or":
        return False
    if answer.op == "list" and all(item.op == "relation" for item in answer.args):
        return _unordered(reference.args, answer.args)
    items = _items(reference)
    if not items:
        return False
    if distinct:
        return answer.op in ("sequence", "list") and _all_same(items, _items(answer))
    return _same_sequence(Node("list", items, name=","), answer)


def _is_set(node: Node) -> bool:
    if node.op in ("∪", "∩", "∖", "builder") or (node.op == "sym" and node.name == "\\R"):
        return True
    if node.op == "relation":
        return bool(set(node.name) - {"=", "≈"})
    if node.op == "list":
        return bool(node.args) and all(_is_set(item) for item in node.args)
    return node.op == "sequence" and len(node.args) == 2 and set(node.name) & set("[]") != set()


def _same_set(reference: Node, answer: Node) -> bool:
    left, right = real_set(reference), real_set(answer)
    return same_set(left, right) and (not left.name or right.name in ("", left.name))


def _same_matrix(reference: Node, answer: Node) -> bool:
    def rows(node: Node) -> list[tuple[Node, ...]]:
        return [row.args for row in node.args] if node.op == "matrix" else []

    left, right = rows(reference), rows(answer)
    if left and right:
        return len(left) == len(right) and all(map(_all_same, left, right))
    vector, other = (left, answer) if left else (right, reference)
    flat = tuple(item for row in vector for item in row)
    if (
        other.op != "sequence"
        or other.name not in ("()", "[]")
        or (len(vector) > 1 and any(len(row) != 1 for row in vector))
    ):
        return False
    return _all_same(flat, other.args) if left else _all_same(other.args, flat)


# ---- equations and inequalities


def _same_relation(reference: Node, answer: Node) -> bool:
    if set(reference.name) - {"=", "≈"}:
        return _same_set(reference, answer)
    value = assigned(reference)
    if answer.op == "relation":
        if set(answer.name) - {"=", "≈"} or len(answer.args) != 2 or len(reference.args) != 2:
            return False
        theirs = assigned(answer)
        if value is not None and theirs is not None and not _clash(reference, answer):
            return _same_value(value, theirs)
        return proportional(Node("-", reference.args), Node("-", answer.args))
    if value is None:
        return False
    return _same_value(value, answer)


def _clash(left: Node, right: Node) -> bool:
    """Returns whether two equations define different letters."""
    names = [next((arg.name for arg in node.args if arg.op == "sym"), "") for node in (left, right)]
    return "" not in names and names[0] != names[1]
