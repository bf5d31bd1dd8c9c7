"""YAML documents: objects for people and for ``kubectl``, and templates of users."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flightedl.errors import UsageError
from flightedl.process.importing import install_command


def _yaml() -> Any:
    try:
        import yaml
    except ModuleNotFoundError:
        raise UsageError(f"YAML needs PyYAML: {install_command('kubernetes')}") from None
    return yaml


def from_yaml(path: Path) -> Any:
    """Return the one document of a file. Raises UsageError if it cannot be read, or PyYAML is not installed."""
    yaml = _yaml()
    try:
        return yaml.safe_load(path.read_text("utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from None


def as_yaml(objects: Sequence[Mapping[str, Any]]) -> str:
    """Return YAML documents with keys in the order of the objects. Raises UsageError if PyYAML is not installed."""
    yaml = _yaml()

    class Dumper(yaml.SafeDumper):  # type: ignore[misc, name-defined] # yaml has no types
        """Indents lists, writes long texts as blocks, and repeats what is used twice."""

        def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:  # noqa: ARG002 - yaml's
            super().increase_indent(flow, False)

        def ignore_aliases(self, _data: Any) -> bool:
            return True

    def text(dumper: Any, value: str) -> Any:
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)

    Dumper.add_representer(str, text)
    return str(yaml.dump_all(objects, Dumper=Dumper, sort_keys=False, width=120))
