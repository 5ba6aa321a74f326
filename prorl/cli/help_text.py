"""Lays out `--help`: the terminal's width breaks the lines, not the docstring's."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cyclopts.help import HelpPanel, InlineText
    from rich.console import Console, ConsoleOptions

NO_DEFAULT = ('""', "False")
"""Defaults that say only that an option was not given."""
EXAMPLE = "Example: "
"""The beginning of a paragraph with a command: one that is broken must be whole when copied."""


class WrappedHelp:
    """A help formatter of cyclopts that joins the lines of each paragraph before it is wrapped.

    cyclopts keeps a docstring's line ends, so that at 80 columns every second line has a word or
    two.
    """

    def __call__(self, console: Console, options: ConsoleOptions, panel: HelpPanel) -> None:
        from cyclopts.help import DefaultFormatter

        entries = [
            entry.copy(
                description=_joined(entry.description),
                default=None if entry.default in NO_DEFAULT else entry.default,
            )
            for entry in panel.entries
        ]
        DefaultFormatter()(console, options, panel.copy(entries=entries))

    def render_usage(self, console: Console, options: ConsoleOptions, usage: Any) -> None:
        from cyclopts.help import DefaultFormatter

        DefaultFormatter().render_usage(console, options, usage)

    def render_description(
        self, console: Console, options: ConsoleOptions, description: Any
    ) -> None:
        from rich.text import Text

        from prorl.cli.output import broken

        if not description:
            return
        text = _joined(description).primary_renderable
        if not isinstance(text, Text):
            console.print(description)
            return
        for paragraph in text.plain.split("\n\n"):
            is_example = paragraph.startswith(EXAMPLE)
            line = broken(paragraph, console.width, len(EXAMPLE)) if is_example else paragraph
            console.print(Text(f"{line}\n"))


def _joined(inline: InlineText) -> InlineText:
    """The same text with paragraphs of one line each."""
    from rich.text import Text

    text = inline.primary_renderable
    if isinstance(text, Text):
        plain = re.sub(r"(?<!\n)\n(?!\n)", " ", text.plain.rstrip())
        inline.primary_renderable = Text(plain, end=text.end)
    return inline
