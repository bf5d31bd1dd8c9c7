"""Generated sections of the reference.

The site inserts them under the headings of two pages. The pages themselves contain what the code does not say: reasons,
examples and output.

* ``docs/api.md``: under a heading with names such as ``job.dataset``, the signatures and docstrings of these names
* ``docs/commands.md``: under a heading such as ``flightedl run``, the options with their help

``docs/settings.md`` itself contains its tables, because no command prints them. They come from the comments in
``flightedl.config``, and ``python -m tools.generators.site.reference`` writes them. Everything is Markdown, so that it
can be checked without Sphinx.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import inspect
import itertools
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import click

import flightedl
from flightedl import config
from flightedl.client.data.dataset import Dataset
from flightedl.client.data.group_dataset import GroupDataset
from flightedl.client.data.numbered_dataset import NumberedDataset
from flightedl.client.model.parameters import Parameters
from flightedl.client.once import Once
from flightedl.client.session import Job
from flightedl.client.tables.table import Table
from flightedl.launch.cluster import LocalCluster
from flightedl_tools.main import COMMANDS, command

#: Name of a variable in the examples -> possible classes of its value.
KINDS: dict[str, tuple[type, ...]] = {
    "job": (Job,),
    "data": (Dataset, GroupDataset, NumberedDataset),
    "model": (Parameters,),
    "table": (Table,),
    "won": (Once,),
    "cluster": (LocalCluster,),
}
#: Heading -> class of the settings in its section, without the settings of the class's bases.
SETTINGS: dict[str, type[config.CommonSettings]] = {
    "All processes": config.CommonSettings,
    "Masters and pservers": config.ServerSettings,
    "Masters": config.MasterSettings,
    "Pservers": config.PserverSettings,
    "Trainers": config.TrainerSettings,
}

_PACKAGE = Path(flightedl.__file__).parent
_CODE = re.compile(r"`([^`]+)`")
_SECTION = re.compile(r"^(Args|Returns|Yields|Raises):$")
_TITLES = {"Args": "Arguments"}
_ROLE = re.compile(r":\w+:`~?(?:[\w.]+\.)?(\w+)`")
_ITEM = re.compile(r"(\*{0,2}\w+): ")
_NUMBER = re.compile(r"(INTEGER|FLOAT)( RANGE)?")
_TABLE = re.compile(r"(?:\|.*\n)+")
#: Longer signatures have one line per argument.
_WIDTH = 100


def api(heading: str) -> str:
    """Return the signatures and docstrings of the names in a heading of the API page."""
    names = [name for name in _CODE.findall(heading) if re.fullmatch(r"[a-z]+(\.torch)?\.\w+", name)]
    sections = [of_torch(name) if ".torch." in name else described(name, value_of(name)) for name in names]
    return "\n\n".join(filter(None, sections))


def of_torch(name: str) -> str:
    """Return the signature and the docstring of a name of ``fe.torch``, which are read without importing PyTorch."""
    parsed = (ast.parse(path.read_text("utf-8")) for path in (_PACKAGE / "torch").glob("*.py"))
    bodies = [node for tree in parsed for node in tree.body]
    nodes = {node.name: node for node in bodies if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    own = function = nodes[name.rpartition(".")[2]]
    while isinstance(function, ast.ClassDef):
        constructors = [each for each in function.body if isinstance(each, ast.FunctionDef) and each.name == "__init__"]
        function = constructors[0] if constructors else nodes[ast.unparse(function.bases[0])]
    arguments = ast.unparse(function.args).removeprefix("self, ")
    return f"```python\n{name}({arguments})\n```\n\n{markdown(ast.get_docstring(own) or '')}"


def value_of(name: str) -> Any:
    """Return the object with a documented name, such as ``job.dataset``; None for attributes of instances."""
    owner, _, member = name.partition(".")
    owners = KINDS.get(owner, (flightedl,))
    return next((getattr(each, member) for each in owners if hasattr(each, member)), None)


def described(name: str, value: Any) -> str:
    """Return the signature and the docstring of an object; empty for None."""
    if value is None:
        return ""
    text = markdown(inspect.getdoc(value) or "")
    if isinstance(value, ModuleType) or value is Job or (isinstance(value, type) and issubclass(value, enum.Enum)):
        return text
    is_property = isinstance(value, property)
    shown = f"{name}: {value.fget.__annotations__['return']}" if is_property else signature(name, value)
    return f"```python\n{shown}\n```\n\n{text}"


def signature(name: str, value: Any) -> str:
    """Return the signature of a function or class, with the types of its arguments and result."""
    found = inspect.signature(value)
    is_silent = found.return_annotation in {inspect.Parameter.empty, "None", None}
    returned = "" if is_silent else f" -> {found.return_annotation}"
    shown: list[str] = []
    for parameter in found.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in shown:
            shown.append("*")
        if parameter.name != "self":
            shown.append(_parameter(parameter))
    line = f"{name}({', '.join(shown)}){returned}"
    if len(line) <= _WIDTH:
        return line
    return f"{name}(\n" + "".join(f"    {each},\n" for each in shown) + f"){returned}"


def _parameter(parameter: inspect.Parameter) -> str:
    prefix = "**" if parameter.kind is parameter.VAR_KEYWORD else ""
    shown = f"{prefix}{parameter.name}: {parameter.annotation}"
    if parameter.default is parameter.empty:
        return shown
    is_plain = isinstance(parameter.default, str | int | float | tuple | None)
    return f"{shown} = {parameter.default!r}" if is_plain else f"{shown} = ..."


def markdown(docstring: str) -> str:
    """Convert a docstring to Markdown."""
    parts: dict[str, list[str]] = {"": []}
    title = ""
    for line in docstring.splitlines():
        if match := _SECTION.match(line):
            title = match[1]
            parts[title] = []
        else:
            parts[title].append(line)
    shown = [_prose(parts.pop(""))]
    for title, lines in parts.items():
        shown.append(f"**{_TITLES.get(title, title)}**")
        body = textwrap.dedent("\n".join(lines))
        shown.append(_items(body) if _ITEM.match(body) else _prose(body.splitlines()))
    return "\n\n".join(shown)


def _prose(lines: list[str]) -> str:
    """Convert paragraphs, lists, and code after ``::``."""
    text = "\n".join(lines).strip("\n")
    before, *blocks = re.split(r"^::\n\n((?:(?: {4}.*)?(?:\n|\Z))+)", text, flags=re.MULTILINE)
    shown = _inline(before)
    for code, after in zip(blocks[::2], blocks[1::2], strict=True):
        shown += f"```text\n{textwrap.dedent(code).strip()}\n```\n\n{_inline(after)}"
    return shown.strip()


def _inline(text: str) -> str:
    return _ROLE.sub(r"`\1`", text).replace("``", "`")


def _items(body: str) -> str:
    """Convert ``name: text`` items to a list. An item's paragraphs that are themselves items form a nested list."""
    items: list[list[str]] = []
    for line in body.splitlines():
        if line[:1].strip():
            items.append([line])
        elif items:
            items[-1].append(line)
    shown = []
    for first, *rest in items:
        paragraphs = "\n".join([first, textwrap.dedent("\n".join(rest))]).strip().split("\n\n")
        head, *inner = (" ".join(paragraph.split()) for paragraph in paragraphs)
        shown += [f"* {_named(head)}", *(f"  * {_named(each)}" for each in inner)]
    return "\n".join(shown)


def _named(item: str) -> str:
    return _inline(_ITEM.sub(lambda match: f"`{match[1]}`: ", item, count=1))


def commands(heading: str) -> str:
    """Return the usage and options of the command in a heading of the commands page."""
    name = heading.strip("`").removeprefix("flightedl ")
    if name not in COMMANDS:
        return ""
    found = command.get_command(click.Context(command, info_name="flightedl"), name)
    assert found is not None
    return "\n\n".join(_command(f"flightedl {path}", each) for path, each in subcommands(name, found))


def subcommands(path: str, found: click.Command) -> Iterator[tuple[str, click.Command]]:
    """Yield a command, or the subcommands of a group."""
    if not isinstance(found, click.Group):
        yield path, found
        return
    context = click.Context(found)
    for name in found.list_commands(context):
        each = found.get_command(context, name)
        assert each is not None
        yield from subcommands(f"{path} {name}", each)


def _command(path: str, found: click.Command) -> str:
    context = click.Context(found, info_name=path)
    usage = " ".join([path, *found.collect_usage_pieces(context)])
    options = [each for each in found.params if isinstance(each, click.Option)]
    records = [record for each in options if (record := each.get_help_record(context)) is not None]
    table = [f"| `{_cell(_NUMBER.sub('N', names))}` | {_cell(text)} |" for names, text in records]
    head = ["| option | meaning |", "|---|---|"] if table else []
    text = markdown(inspect.cleandoc(found.help or ""))
    return f"```text\n{usage}\n```\n\n{text}\n\n" + "\n".join([*head, *table])


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def settings(heading: str) -> str:
    """Return the table of a section on the settings page: variables, defaults and meanings."""
    kind = SETTINGS[heading]
    rows = []
    for name, text in comments(kind).items():
        default = next(field.default for field in dataclasses.fields(kind) if field.name == name)
        shown = f"`{default}`" if str(default) else "empty"
        rows.append(f"| `{config.ENVIRONMENT_PREFIX}{name.upper()}` | {shown} | {_inline(_cell(text))} |")
    return "\n".join(["| variable | default | meaning |", "|---|---|---|", *rows, ""])


def with_settings(text: str) -> str:
    """Return the text of the settings page with up-to-date tables."""
    for heading in SETTINGS:
        before, title, section = text.partition(f"\n## {heading}\n")
        introduction, rest = _TABLE.split(section, maxsplit=1)
        text = f"{before}{title}{introduction}{settings(heading)}{rest}"
    return text


def comments(kind: type) -> dict[str, str]:
    """Return the comments (``#:``) of the fields that a class itself declares; empty for a field without a comment."""
    lines = Path(config.__file__).read_text("utf-8").splitlines()
    tree = ast.parse("\n".join(lines))
    body = next(node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == kind.__name__)
    found: dict[str, str] = {}
    for field in body:
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            above = itertools.takewhile(lambda line: line.startswith("    #: "), reversed(lines[: field.lineno - 1]))
            found[field.target.id] = " ".join(line.removeprefix("    #: ") for line in [*above][::-1])
    return found


#: Page -> function that returns the section for a heading of the page, or an empty string if there is none.
GENERATED: Mapping[str, Callable[[str], str]] = {
    "docs/api.md": api,
    "docs/commands.md": commands,
}

if __name__ == "__main__":
    _page = Path(__file__).resolve().parents[3] / "docs" / "settings.md"
    _page.write_text(with_settings(_page.read_text("utf-8")), "utf-8")
