"""Groups of commands, and choices, that suggest the nearest name for one they do not have."""

from __future__ import annotations

from typing import Any

import click

from paceline.errors import UnknownName


class Group(click.Group):
    """A group of commands that refuses an unknown one in one sentence, with a suggestion."""

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        known = self.list_commands(ctx)
        if args and args[0] not in known and not args[0].startswith("-"):
            raise UnknownName(self.what, args[0], known)
        return super().resolve_command(ctx, args)

    @property
    def what(self) -> str:
        """What a member of this group is called in a message."""
        return f"command of {self.name}"


class Choice(click.Choice[str]):
    """A choice of names that refuses an unknown one in one sentence, with a suggestion."""

    def __init__(self, what: str, names: list[str]) -> None:
        super().__init__(names)
        self.what = what

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if value not in self.choices:
            raise UnknownName(self.what, str(value), self.choices)
        return str(value)
