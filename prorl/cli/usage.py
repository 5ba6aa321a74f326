"""Words for a mistake on the command line: what was given, what was expected, what is near."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from cyclopts.exceptions import (
    CoercionError,
    CycloptsError,
    MissingArgumentError,
    UnusedCliTokensError,
    ValidationError,
)
from pydantic import ValidationError as PydanticError

from prorl.config.validation import dotted, expected

_KINDS = {int: "a whole number", float: "a number", bool: "true or false"}


def refused(error: CycloptsError) -> str:
    """The line for a person; ends with where the flags of the command are listed."""
    command = " ".join(("prorl", *(error.command_chain or ())))
    return f"{_mistake(error).rstrip('.')}{_hint(error)}; see `{command} --help`"


def _hint(error: CycloptsError) -> str:
    """Returns a hint where a value that has no place belongs, for commands that people often give
    one.
    """
    unused = getattr(error, "unused_tokens", None) or ("",)
    if tuple(error.command_chain or ()) == ("show",) and unused[0].isdecimal():
        return f"; a rollout is chosen by `--rollout {unused[0]}`"
    if isinstance(error, MissingArgumentError) and getattr(error, "keyword", "") == "--watch":
        return ", the seconds between two looks: `--watch 2`"
    return ""


def _mistake(error: CycloptsError) -> str:
    match error:
        case MissingArgumentError(argument=argument, keyword=None) if argument is not None:
            return f"no {argument.name}"
        case MissingArgumentError(keyword=keyword):
            return f"`{keyword}` stands alone; expected a value after it"
        case UnusedCliTokensError(unused_tokens=tokens):
            return f"{' '.join(tokens or ())!r} is more than this command takes"
        case CoercionError(token=token, target_type=target) if token and target in _KINDS:
            return f"{token.keyword or 'given'} {token.value!r}; expected {_KINDS[target]}"
        case ValidationError(exception_message=_) if isinstance(
            refusal := error.__cause__, PydanticError
        ):
            first = refusal.errors()[0]
            return f"`--{dotted(first['loc'])}` {first['input']!r}; expected {expected(first)}"
    text = " ".join(str(error).split()).replace(". Did you", "; did you")
    return text[:1].lower() + text[1:]


def nearest(name: str, names: Iterable[str]) -> str:
    """Returns the hint of an error for an unknown name; empty when none is like it.

    >>> nearest("orcle", ["oracle", "noop"])
    'did you mean `oracle`?'
    """
    close = difflib.get_close_matches(name, list(names), n=1)
    return f"did you mean `{close[0]}`?" if close else ""
