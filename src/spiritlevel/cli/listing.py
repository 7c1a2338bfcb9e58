"""Commands listed with the whole first paragraph of their help: a line that ends in three dots says too little to choose by."""

from __future__ import annotations

from typing import Any

from typer.core import TyperGroup


class ListedCommands(TyperGroup):
    """A group whose help wraps what its commands do instead of cutting it off."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        commands = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        rows = [(name, _first_paragraph(each.help or "")) for name, each in commands if each is not None]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


def _first_paragraph(text: str) -> str:
    """The text up to its first blank line, on one line.

    >>> _first_paragraph("Build a network\\nas asked for (Dinh et al. 2017).\\n\\nMore.")
    'Build a network as asked for (Dinh et al. 2017).'
    """
    return " ".join(text.strip().split("\n\n")[0].split())
