"""Messages of strangers are rejected and counted, change nothing, and the pserver continues.

``FLIGHTEDL_FUZZ_MESSAGES`` sets the number of mutated messages of the long run; ``python -m tests.pserver.fuzz`` sends
200,000 in a few minutes.
"""

from __future__ import annotations

import os
import sys
from collections import Counter

import msgspec
import pytest

from flightedl.domain.consistency.modes import Async
from flightedl.messages.base import encode
from flightedl.pserver.stores.array_span import ArraySpan

from .fuzz import MODES, SIZES, Target, attack
from .fuzz_line import attack_line
from .fuzz_sharing import attack_descriptors, attack_lending


@pytest.mark.parametrize("mode", MODES)
def test_damaged_messages_change_nothing(mode: str) -> None:
    target = attack(2_000, seed=1, mode=MODES[mode])
    assert target.refused.total() > 1_500


@pytest.mark.storm
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("mode", MODES)
def test_hundreds_of_thousands_of_damaged_messages_change_nothing(mode: str) -> None:
    count = int(os.environ.get("FLIGHTEDL_FUZZ_MESSAGES", "10000"))
    target = attack(count, seed=2, mode=MODES[mode])
    print(f"{target.refused} refused, {target.accepted} accepted, of {count} damaged and the correct ones between")
    assert target.refused.total() > count // 2


@pytest.mark.skipif(sys.platform != "linux", reason="memory is shared on Linux only")
def test_a_trainer_cannot_change_values_that_are_lent_to_another_one() -> None:
    found = attack_lending(150, seed=1)
    assert min(found[what] for what in ("honest", "taken back", "taken", "message")) > 5, found


@pytest.mark.skipif(sys.platform != "linux", reason="memory is shared on Linux only")
def test_descriptors_that_are_not_shared_memory_are_rejected() -> None:
    found = attack_descriptors(300, seed=1)
    assert found["taken"] > 5, found
    assert found["MessageError"] > 100, found


@pytest.mark.skipif(sys.platform != "linux", reason="lines are offered on Linux only")
def test_damaged_messages_on_a_line_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flightedl.rpc.line._LOOK_MS", 1)
    found = attack_line(300, seed=1)
    assert min(found[what] for what in ("taken", "message", "damaged", "left")) > 2, found


@pytest.mark.skipif(sys.platform != "linux", reason="memory is shared on Linux only")
def test_the_fuzzer_detects_changes_of_lent_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ArraySpan, "detach_for_write", lambda span: span.values)
    with pytest.raises(AssertionError, match="lent values have changed"):
        attack_lending(150, seed=1)


@pytest.mark.parametrize("mode", MODES)
def test_the_fuzzer_detects_changed_values(mode: str) -> None:
    target = Target(MODES[mode])
    target.require_healthy()
    target.shard.dense.span(0).values[0] += 0.5
    with pytest.raises((AssertionError, ValueError)):
        target.check()


@pytest.mark.parametrize(
    ("field", "value"), [("member", 8), ("generation", 6), ("trainer", "u")], ids=["member", "generation", "trainer"]
)
def test_a_sender_that_resembles_a_member_is_rejected_and_counted(field: str, value: object) -> None:
    target = Target(Async())
    header = msgspec.structs.replace(target.header(), **{field: value})
    target.take(encode(header), target.message())
    assert +Counter(target.shard.meter.rows_by_outcome) == {"not_member": len(SIZES)}
    target.check()
