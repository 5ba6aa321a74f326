r"""Congruences: `n \equiv 4 \pmod 7`.

>>> same_congruence(r"n\equiv 4\pmod 7", r"n \equiv 11 \pmod{7}")
True
>>> same_congruence(r"x \equiv 4 \pmod{7}", r"x \equiv 4 \pmod{9}"), same_congruence("x = 4", "4")
(False, None)
"""

from __future__ import annotations

import re
from typing import NamedTuple

_MODULUS = re.compile(r"\\[pb]?mod(?![a-z])|\(\s*mod(?:ulo)?\b|(?:\\equiv|≡)", re.IGNORECASE)
_WHOLE = re.compile(
    r"(?:(?P<name>[^=≡]{1,30}?)(?:≡|=))?(?P<residues>[^≡=()]{1,60}?)"
    r"[,(]*mod(?:ulo)?(?P<modulus>[^≡=,()]{1,30})\)*"
)


class _Congruence(NamedTuple):
    name: str
    residues: frozenset[str]
    modulus: str


def same_congruence(reference: str, answer: str) -> bool | None:
    """Returns whether both say one congruence; None where the reference is none.

    Residues are compared as numbers modulo the modulus, other signs as they are written.
    """
    if not _MODULUS.search(reference):
        return None
    expected = _read(reference)
    if expected is None:
        return _flat(reference) == _flat(answer)
    actual = _read(answer)
    return (
        actual is not None
        and actual._replace(name="") == expected._replace(name="")
        and actual.name in ("", expected.name)
    )


def _read(text: str) -> _Congruence | None:
    match = _WHOLE.fullmatch(_flat(text))
    if match is None:
        return None
    modulus = match["modulus"]
    if re.fullmatch(r"0*", modulus):
        return None
    residues = re.split(r",|or|and", match["residues"])
    if not all(residues):
        return None
    return _Congruence(
        match["name"] or "", frozenset(_residue(residue, modulus) for residue in residues), modulus
    )


def _residue(text: str, modulus: str) -> str:
    if re.fullmatch(r"[-+]?\d{1,300}", text) and re.fullmatch(r"\d{1,300}", modulus):
        return str(int(text) % int(modulus))
    return text


def _flat(text: str) -> str:
    """A congruence in one spelling, without spaces and braces."""
    text = re.sub(r"\\(?:text(?:rm|bf)?|mathrm|operatorname)(?![a-z])", "", text)
    text = re.sub(r"\\equiv(?![a-z])", "≡", text.replace("−", "-"))
    text = re.sub(r"\\(?:left|right|quad|qquad)(?![a-z])|\\[,;:! ]|[~{}$\s]", "", text)
    return re.sub(r"\\[pb]?mod(?![a-z])", "mod", text).rstrip(".")
