"""How a template's next prompt relates to what we append: the words of a proof."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class Verdict(StrEnum):
    """How the template's next prompt relates to what we append, from best to worst."""

    EXACT = "exact"
    """The template writes the same."""
    DROPS_THOUGHTS = "drops thoughts"
    """It writes the same tail, and takes earlier thoughts out of the past, or empty ones."""
    REWRITES = "rewrites"
    """It writes the same tail, and changes the past in another way."""
    DIFFERS = "differs"
    """Its next prompt does not even end in what we append."""
    REFUSES = "refuses"
    """It raises, or leaves the new messages out."""


class TurnKind(StrEnum):
    USER = "user"
    """A user message after an answer."""
    RESULT = "result"
    """A result after a call."""
    RESULTS = "results"
    """Two results after two calls."""
    TEXT_AND_CALL = "text and call"
    """A result after a call that something was said before."""
    SECOND_CALL = "second call"
    """A result after a second call."""
    USER_AFTER_CALL = "user after call"
    """A user message after a call, its result and an answer."""


class Finding(NamedTuple):
    verdict: Verdict
    why: str = ""


class Proof(NamedTuple):
    findings: dict[TurnKind, Finding]
    thinks: bool
    """Its turns hold thoughts, in this run's mode."""
    calls: str
    """Empty where a call comes back from what the template writes of it; else what is wrong."""
    shows_tools: bool
    """A first prompt says what tools there are; else the env's own messages have to."""

    @property
    def tools(self) -> str:
        """Empty where tools can be offered, else why not."""
        result = self.findings[TurnKind.RESULT]
        if result.verdict is Verdict.REFUSES:
            return result.why or "the template does not show results of tools"
        if result.verdict is Verdict.DIFFERS:
            return "nothing shows how a result follows a call"
        return self.calls

    def worst(self, *kinds: TurnKind) -> Verdict:
        return max((self.findings[kind].verdict for kind in kinds), key=list(Verdict).index)

    def summary(self) -> tuple[str, str]:
        """How such a model is run, and why.

        `exact`, `append or segment`, `segment` at user messages, or `no tools`.
        """
        if self.tools:
            return "no tools", self.tools
        verdict = self.worst(TurnKind.USER, TurnKind.USER_AFTER_CALL)
        others = ", ".join(
            f"{kind}: {found.verdict}"
            for kind, found in self.findings.items()
            if found.verdict is not Verdict.EXACT
        )
        if verdict is Verdict.EXACT:
            return "exact", others
        return ("append or segment" if verdict is Verdict.DROPS_THOUGHTS else "segment"), others
