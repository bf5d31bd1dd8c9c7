"""The pages of ``docs/`` are complete: links have targets, and every public name and setting is documented."""

from __future__ import annotations

import inspect
import re
import shlex
import tomllib
from pathlib import Path

import click
import msgspec
import pytest

import flightedl as fe
from flightedl.client.progress import Totals
from flightedl.client.progress import figures as trainer_figures
from flightedl.domain.diagnosis.findings import Cause
from flightedl.formats.registry import FORMATS
from flightedl.master.metrics import MEASURES as OF_MASTERS
from flightedl.master.metrics import figures as master_figures
from flightedl.messages.status import PserverStatusReply, StatusReply
from flightedl.pserver.meter import MEASURES as OF_PSERVERS
from flightedl.pserver.metrics import figures as pserver_figures
from flightedl_tools.main import COMMANDS, command
from tools.generators.site.reference import (
    KINDS,
    SETTINGS,
    api,
    commands,
    comments,
    subcommands,
    value_of,
    with_settings,
)

from .pages import PAGES, ROOT, examples, sections, sessions, sessions_in, without_fences
from .shapes import COMPARED
from .test_timelines import HEADINGS as TIMELINES

_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_CODE = re.compile(r"`([^`]+)`")
ALERTS = re.findall(r"- alert: (\w+)", (ROOT / "deploy" / "monitoring" / "alerts.yaml").read_text())
LINKED = [*PAGES, ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "deploy" / "README.md"]

#: Attributes that only the session calls: public within the package, but undocumented.
OF_THE_SESSION = {
    "data": {"close", "current", "fail_current", "registered_again"},
    "model": {
        "abandon_batch",
        "batch_ends",
        "carry_out",
        "close",
        "close_batch",
        "current_batch",
        "forget_rows",
        "give_up_sum",
        "gradient_memory",
        "joined",
        "listen",
        "look_up",
        "open_batch",
        "plan",
        "push_rows",
        "push_sum",
        "refresh",
        "rejected",
        "run",
        "step_rows",
        "swap",
        "where",
    },
    "table": {"asked", "asks_for", "declared", "known", "push_distinct", "rows_of"},
}


def slug(heading: str) -> str:
    """Return GitHub's anchor of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("page", LINKED, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_has_a_target(page: Path) -> None:
    for target in _LINK.findall(without_fences(page)):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        linked = page.parent / path if path else page
        assert linked.exists(), f"{page.name} links to {target}, which does not exist"
        if anchor:
            assert anchor in map(slug, sections(linked)), (
                f"{page.name} links to {target}, but no heading has this anchor"
            )


def test_every_page_is_in_the_index_and_the_index_in_the_readme() -> None:
    for index in (page for page in PAGES if page.name == "index.md"):
        targets = {target.partition("#")[0] for target in _LINK.findall(index.read_text())}
        below = {path.relative_to(index.parent).as_posix() for path in PAGES if path.parent == index.parent}
        below |= {f"{path.parent.name}/index.md" for path in index.parent.glob("*/index.md")}
        assert below - {"index.md"} <= targets, f"{index} lacks a page of its directory"
    assert "docs/index.md" in _LINK.findall((ROOT / "README.md").read_text())


def public(name: str, kind: type) -> dict[str, object]:
    """Return the public members of a class by documented name."""
    own = {
        member: value
        for class_ in kind.__mro__
        if class_.__module__.startswith("flightedl.")
        for member, value in vars(class_).items()
        if not member.startswith("_") and (callable(value) or isinstance(value, property))
    }
    return {f"{name}.{member}": own[member] for member in own if member not in OF_THE_SESSION.get(name, ())}


NAMES: dict[str, object] = {
    **{f"fe.{name}": getattr(fe, name) for name in fe.__all__},
    **{name: value for owner, kinds in KINDS.items() for kind in kinds for name, value in public(owner, kind).items()},
}
API = {name: text for heading, text in sections(ROOT / "docs" / "api.md").items() for name in _CODE.findall(heading)}


@pytest.mark.parametrize("name", NAMES)
def test_every_public_name_has_a_section_with_an_example(name: str) -> None:
    assert name in API, f"docs/api.md needs a heading with `{name}`, a description and an example"
    blocks = re.findall(r"^```python[^\n]*\n(.*?)^```$", API[name], re.DOTALL | re.MULTILINE)
    member = name.partition(".")[2]
    shown = rf"\.{member}\b" if name not in {"fe.Job", "fe.errors"} else rf"fe\.{member}\b"
    assert any(re.search(shown, block) for block in blocks), f"the section of {name} in docs/api.md has no example"


@pytest.mark.parametrize("name", [name for name in NAMES if value_of(name) is not None])
def test_every_public_name_has_a_reference_section(name: str) -> None:
    """Optimizers, schedules and initializers name their settings in the signature, and explain them in the page."""
    section = api(f"`{name}`")
    described = re.sub(r"^```.*?^```$", "", section, flags=re.DOTALL | re.MULTILINE)
    value = NAMES[name]
    assert described.strip() or isinstance(value, property), f"{name} needs a docstring"
    if isinstance(value, type | property) and name not in {"fe.Sync", "fe.Async", "fe.Evict", "fe.LocalCluster"}:
        return
    for argument in inspect.signature(value).parameters if callable(value) else ():
        is_told = (
            re.search(rf"^ *\* `\**{argument}`: ", section, re.MULTILINE)
            or argument in described.split("**Raises**")[0]
        )
        assert argument == "self" or is_told, f"the docstring of {name} does not describe {argument}"


def test_every_name_of_torch_has_a_reference_section() -> None:
    text = (Path(fe.__file__).parent / "torch" / "__init__.py").read_text()
    names = re.findall(r'"(\w+)"', text.partition("__all__ = [")[2])
    assert len(names) > 5
    for name in names:
        assert f"fe.torch.{name}" in API
        assert re.match(rf"```python\nfe\.torch\.{name}\(\w+.*\n```\n\n\w", api(f"`fe.torch.{name}`"))


def test_every_extra_for_users_has_its_row() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    rows = re.findall(r"^\| `(\w+)` \|", sections(ROOT / "docs" / "operations.md")["What to install"], re.MULTILINE)
    assert sorted(rows) == sorted(extras.keys() - {"test", "unit", "frameworks", "docs", "lint"})


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md"], ids=lambda page: str(page.relative_to(ROOT)))
def test_no_page_installs_flightedl_from_an_index(page: Path) -> None:
    assert not re.search(r"pip install '?flightedl\b", page.read_text())


def test_every_error_is_documented() -> None:
    section = api("`fe.errors`")
    assert all(re.search(rf"\b{kind.__name__}\b", section) for kind in fe.errors.ERRORS_BY_CODE.values())


def test_the_tables_of_settings_are_current() -> None:
    page = (ROOT / "docs" / "settings.md").read_text()
    assert with_settings(page) == page, "run `python -m tools.generators.site.reference`"


@pytest.mark.parametrize("kind", SETTINGS.values(), ids=lambda kind: kind.__name__)
def test_every_setting_has_a_comment(kind: type) -> None:
    assert [name for name, text in comments(kind).items() if not text] == []


@pytest.mark.parametrize("cause", Cause)
def test_every_finding_has_a_page(cause: str) -> None:
    check_page("findings", cause)


@pytest.mark.parametrize("name", ALERTS)
def test_every_alert_has_a_page(name: str) -> None:
    check_page("alerts", name)


def check_page(folder: str, name: str) -> None:
    page = ROOT / "docs" / folder / f"{name}.md"
    assert page.exists(), f"write {page.relative_to(ROOT)}: what it means, how to check, what to do"
    assert list(sections(page))[1:] == ["What it means", "How to check", "What to do"]
    assert all(text.strip() for text in sections(page).values())


@pytest.mark.parametrize(("folder", "names"), [("findings", {*Cause}), ("alerts", {*ALERTS})])
def test_every_such_page_has_a_source(folder: str, names: set[str]) -> None:
    assert {page.stem for page in PAGES if page.parent.name == folder} == names | {"index"}


def test_operations_lists_every_metric() -> None:
    master = StatusReply(job="a", state="training")
    names = [field.name for field in msgspec.structs.fields(PserverStatusReply) if field.required]
    pserver = PserverStatusReply(**{**dict.fromkeys(names, 0), "members": [], "rows": {}})
    figures = {*master_figures(master), *pserver_figures(pserver), *trainer_figures(Totals(), 0.0)}
    figures |= {each.name if each.buckets else f"{each.name}_total" for each in (*OF_MASTERS, *OF_PSERVERS)}
    documented = sections(ROOT / "docs" / "operations.md")["Metrics"]
    assert {f"flightedl_{name}" for name in figures} <= set(_CODE.findall(documented))


def test_data_lists_every_format_with_its_names() -> None:
    documented = {}
    for line in sections(ROOT / "docs" / "data.md")["Formats"].splitlines():
        cells = line.strip("|").split("|")
        if len(cells) == 4 and "`" in cells[1]:
            documented |= {name: set(_CODE.findall(cells[1])) for name in _CODE.findall(cells[0])}
    assert documented.keys() == FORMATS.keys()
    assert all(set(known.suffixes) <= documented[name] for name, known in FORMATS.items())


def test_commands_has_a_section_for_each_command() -> None:
    found = {heading.strip("`") for heading in sections(ROOT / "docs" / "commands.md")}
    assert {f"flightedl {name}" for name in COMMANDS} <= found


@pytest.mark.parametrize("name", COMMANDS)
def test_the_reference_describes_every_command_and_option(name: str) -> None:
    found = command.get_command(click.Context(command), name)
    assert found is not None
    section = commands(f"`flightedl {name}`")
    for path, each in subcommands(f"flightedl {name}", found):
        assert f"```text\n{path} " in section
        assert each.help
        for option in each.params:
            if isinstance(option, click.Option) and not option.hidden:
                assert option.help or name == "bench", f"{path} {option.opts[0]} needs a help text"
                assert max(option.opts, key=len) in section


#: Programs and their arguments in the pages' shell sessions.
COMMAND_LINES = sorted(
    {
        line.removeprefix("$ ")
        for page in LINKED
        for block in sessions(page)
        for line in block.replace("\\\n", " ").splitlines()
        if line.removeprefix("$ ").startswith("flightedl ")
    }
)


def test_the_pages_show_commands() -> None:
    assert len(COMMAND_LINES) > 20


@pytest.mark.parametrize("line", COMMAND_LINES)
def test_a_shown_command_exists_with_its_options(line: str) -> None:
    words = shlex.split(line, comments=True)[1:]
    found: click.Command = command
    while isinstance(found, click.Group):
        name = next(word for word in words if not word.startswith("-"))
        words.remove(name)
        chosen = found.get_command(click.Context(found), name)
        assert chosen is not None, f"{name} is no command"
        found = chosen
    known = {option for each in found.params for option in (*each.opts, *each.secondary_opts)} | {"--debug", "--help"}
    own = words[: words.index("--")] if "--" in words else words
    used = {word.partition("=")[0] for word in own if re.match(r"--?[a-z]", word)}
    assert used <= known


#: Commands, comments and settings in sessions.
PROGRAMS = re.compile(
    r"(\$ )?(flightedl|export|kubectl|docker|pip|make|python|cp|systemctl|git|sbatch|for|nc|etcd|etcdctl|ps|df"
    r"|timedatectl|torchrun|openssl|source)\s|(\$ )?\.venv/bin/|[A-Z_]+=|#"
)
#: Pages and sections with output, and the test that compares it.
OUTPUTS = {
    ("start.md", ""): "test_start",
    **{("commands.md", f"`flightedl {name}`"): "test_start" for name in COMPARED},
    ("commands.md", "`flightedl doctor`"): "tests/tools/test_doctor",
    **{("recovery.md", heading): "test_timelines" for heading in TIMELINES},
    ("prove.md", "Proving a script"): "tests/launch/test_prove",
    ("data.md", "Delta Lake and Iceberg"): "scripts that need a lake, not output",
    ("exactly-once.md", "See for yourself"): "tests/faults/storm",
    ("README.md", "What happens when something dies"): "tests/faults/storm",
    ("README.md", "Try it"): "tests/examples/test_flights",
}


@pytest.mark.parametrize("page", LINKED, ids=lambda page: str(page.relative_to(ROOT)))
def test_all_output_is_compared_with_that_of_a_command(page: Path) -> None:
    for heading, text in sections(page).items():
        if {(page.name, heading), (page.name, "")} & OUTPUTS.keys():
            continue
        for block in sessions_in(text):
            unknown = [line for line in joined(block) if line.strip() and not PROGRAMS.match(line)]
            assert not unknown, f"{page.name}, {heading}: compare this output in a test, or show only commands"


def joined(block: str) -> list[str]:
    """Return the lines of a block; continued lines are one."""
    return re.sub(r"\\?\n +(?=--)", " ", block).splitlines()


def test_the_tutorial_is_read_in_five_minutes() -> None:
    """At 200 words a minute, including the scripts. Commands and output are not read word by word."""
    page = ROOT / "docs" / "start.md"
    words = len(without_fences(page).split()) + sum(len(example.text.split()) for example in examples(page))
    assert words / 200 <= 5
