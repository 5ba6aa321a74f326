"""Variables of the host that tasks may refer to as `${NAME}`: those that the operator lists.

    export PRORL_TASK_VARIABLES=JUDGE_KEY,JUDGE_URL

The list and the values are those of the process that uses them: where a task is read only names are
looked at, so that no value is in a task, a row or a log.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

LIST = "PRORL_TASK_VARIABLES"
MASK = "***"
TEMPLATE = re.compile(r"\$\{([^}:]+)(?::-(.*))?\}", re.DOTALL)


def listed() -> frozenset[str]:
    return frozenset(filter(None, os.environ.get(LIST, "").replace(" ", "").split(",")))


def filled(variables: Mapping[str, str]) -> dict[str, str]:
    """Variables with what the host has for `${NAME}`, or else their defaults.

    Raises LookupError, which names one that is not listed or not set.

    >>> filled({"A": "x", "B": "${NO_SUCH:-3}"})
    {'A': 'x', 'B': '3'}
    """
    allowed, values = listed(), {}
    for name, text in variables.items():
        values[name] = text
        if match := TEMPLATE.fullmatch(text):
            value = os.environ.get(match[1]) if match[1] in allowed else None
            if value is None and match[2] is None:
                why = "not set" if match[1] in allowed else f"not in {LIST}"
                raise LookupError(f"the host's variable {match[1]} is {why} on this node")
            values[name] = match[2] if value is None else value
    return values


def masked(text: str, variables: Mapping[str, str]) -> str:
    """A text without the values that these variables have from the host."""
    allowed = listed()
    for template in variables.values():
        match = TEMPLATE.fullmatch(template)
        value = os.environ.get(match[1]) if match and match[1] in allowed else None
        if value:
            text = text.replace(value, MASK)
    return text
