"""A group that imports a command only when it is first used, so that ``--help`` is fast."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import click

from flightedl.process.importing import without_collection


class LazyGroup(click.Group):
    """A group of subcommands. ``lazy`` maps a name to a module, an attribute, and one line of help."""

    def __init__(self, *given: Any, lazy: Mapping[str, tuple[str, str, str]], **options: Any) -> None:
        super().__init__(*given, **options)
        self._lazy = lazy

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
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_module, _attribute, text) in self._lazy.items()])
