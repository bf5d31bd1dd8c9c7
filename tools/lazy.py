"""A group that imports a command only when it is first used, so that ``--help`` is fast."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

import click

from flightedl.process.importing import without_collection


class LazyGroup(click.Group):
    """A group of subcommands.

    Args:
        given: Arguments of ``click.Group``.
        lazy: Name -> (module, attribute, one line of help).
        sections: Title -> names of the commands that ``--help`` lists under it; None for a single list.
        options: Keyword arguments of ``click.Group``.
    """

    def __init__(
        self,
        *given: Any,
        lazy: Mapping[str, tuple[str, str, str]],
        sections: Mapping[str, Sequence[str]] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(*given, **options)
        self._lazy = lazy
        self._sections = {"Commands": tuple(lazy)} if sections is None else sections

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*self._lazy, *super().list_commands(ctx)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self._lazy:
            return super().get_command(ctx, cmd_name)
        module, attribute, _help = self._lazy[cmd_name]
        with without_collection():
            command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002 - click's
        spacing = max(map(len, self._lazy))
        for title, names in self._sections.items():
            with formatter.section(title):
                formatter.write_dl([(name.ljust(spacing), self._lazy[name][2]) for name in names])
