"""``flightedl mode``: options and output."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from flightedl.domain.consistency.modes import Async, Bounded, Sync
from flightedl.errors import UsageError
from flightedl.messages.tasks import ModeReply
from flightedl_tools.main import run_command_line
from flightedl_tools.mode import _sentence, _wanted, described, mode


@pytest.mark.parametrize(
    ("kind", "given", "expected"),
    [
        (None, {}, None),
        ("sync", {}, Sync()),
        ("Sync", {"reduce": "sum", "backup": 1}, Sync(reduce="sum", backup=1)),
        ("async", {"push_every": 4, "pull_every": 2}, Async(push_every=4, pull_every=2)),
        ("bounded", {"staleness": 0}, Bounded(0)),
    ],
)
def test_options_are_converted_to_a_mode(kind: str | None, given: dict[str, object], expected: object) -> None:
    assert _wanted(kind, given) == expected


@pytest.mark.parametrize(
    ("kind", "given", "text"),
    [
        ("fast", {}, "no mode 'fast': choose sync, async or bounded"),
        (None, {"backup": 1}, "options need a mode"),
        ("bounded", {}, "Bounded needs 'staleness'"),
        ("async", {"backup": 1}, "Async has no setting 'backup'; it has push_every"),
        ("sync", {"backup": -1}, "backup is -1, but must be at least 0"),
        ("sync", {"backup": 1, "deterministic": True}, "set backup to 0"),
    ],
)
def test_impossible_modes_raise_one_sentence(kind: str | None, given: dict[str, object], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        _wanted(kind, given)


def test_a_mode_is_described_by_its_settings_that_differ_from_defaults() -> None:
    assert described({}) == ""
    assert described(Sync().to_json()) == "Sync()"
    assert described(Async(push_every=4, reduce="sum").to_json()) == "Async(push_every=4, reduce='sum')"
    assert described(Bounded(2).to_json()) == "Bounded(staleness=2)"


def test_the_sentence_names_the_first_round_or_missing_pservers() -> None:
    agreed = ModeReply(mode=Async().to_json(), is_agreed=True, round=12)
    assert _sentence(agreed, is_change=True) == "mode Async() on all pservers, since round 12"
    waiting = ModeReply(mode=Async().to_json(), is_agreed=False, round=12, waiting_for="pserver 1 to begin Async")
    assert "not yet in effect: waiting for pserver 1" in _sentence(waiting, is_change=True)


def test_help_lists_the_settings_of_all_modes() -> None:
    text = CliRunner().invoke(mode, ["--help"]).output
    assert all(name in text for name in ("--reduce", "--backup", "--push-every", "--pull-every", "--staleness "))


def test_an_unknown_mode_raises_one_sentence_with_exit_code_two(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command_line(["mode", "fast", "--etcd", "127.0.0.1:1"]) == 2
    assert capsys.readouterr().err == "flightedl: there is no mode 'fast': choose sync, async or bounded\n"
