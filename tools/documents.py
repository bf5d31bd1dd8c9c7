"""YAML documents: Kubernetes objects for users and ``kubectl``, and users' pod templates."""

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
    """Return the document in a file. Raises UsageError if the file is unreadable or PyYAML is not installed."""
    yaml = _yaml()
    try:
        return yaml.safe_load(path.read_text("utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UsageError(f"cannot read {path}: {error}") from None


def as_yaml(objects: Sequence[Mapping[str, Any]]) -> str:
    """Return the objects as YAML documents, with keys in their order. Raises UsageError if PyYAML is not installed."""
    yaml = _yaml()

    class Dumper(yaml.SafeDumper):  # type: ignore[misc, name-defined] # yaml has no types
        """A dumper that indents lists, writes multi-line strings as blocks, and never writes aliases."""

        def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:  # noqa: ARG002 - yaml's
            super().increase_indent(flow, False)

        def ignore_aliases(self, _data: Any) -> bool:
            return True

    def text(dumper: Any, value: str) -> Any:
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)

    Dumper.add_representer(str, text)
    return str(yaml.dump_all(objects, Dumper=Dumper, sort_keys=False, width=120))
