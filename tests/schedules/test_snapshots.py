"""Every order in which a checkpoint's thread, pushes and a newer order use the blocks and the copies' memory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from flightedl.domain.consistency.modes import Async, Mode, Sync
from flightedl.domain.exactly_once.applied import AppliedBatches
from flightedl.domain.exactly_once.batches import Batch
from flightedl.domain.model.parameters import ParameterSpec
from flightedl.formats.shard_files import StoredBlock
from flightedl.pserver.cuts import copier, copying, snapshots
from tests.pserver.test_snapshots import Pserver
from tests.support.memory import MemoryStorage
from tests.support.planting import Planted, bug, drops, swaps

from .scheduler import Run, explore, finds, running

SPECS = [ParameterSpec("w", (2,)), ParameterSpec("b", (3,))]
MODULES = [copier, copying]


class File:
    """A written file: its blocks, as they are when each is written, and the batches that it lists."""

    hash = ""
    size_bytes = 1

    def __init__(self, applied: bytes, blocks: Iterable[StoredBlock]) -> None:
        self.applied = AppliedBatches.decode(applied, range(len(SPECS)))
        self.blocks: list[tuple[int, int, list[float]]] = []
        for block in blocks:
            running().point()
            half = block.values.size // 2
            first = block.values[:half].tolist()
            running().point()
            self.blocks.append((block.number, block.version, first + block.values[half:].tolist()))


@pytest.fixture(autouse=True)
def files(monkeypatch: pytest.MonkeyPatch) -> dict[str, File]:
    """Write files slowly to memory; name -> file."""
    found: dict[str, File] = {}

    def write(_storage: object, name: str, _header: object, applied: bytes, blocks: Any, *_: object) -> File:
        file = found[name] = File(applied, blocks)
        return file

    monkeypatch.setattr(snapshots, "write_shard", write)
    _written.append(found)
    return found


#: The files of the current test.
_written: list[dict[str, File]] = []


def _wait(run: Run, pserver: Pserver) -> None:
    """Wait until a file is reported, and check that it has the values that follow from the batches that it lists."""

    def is_over() -> bool:
        progress = pserver.snapshots._state.progress
        return progress is not None and progress.state not in {"waiting", "taken"}

    run.block(is_over, 5.0)
    assert run.now == 0.0, "a wake-up was lost"
    progress = pserver.snapshots.progress
    assert progress is not None
    assert progress.file is not None, progress
    file = _written[-1][progress.file.name]
    assert len(file.blocks) == len(SPECS)
    for number, version, values in file.blocks:
        count = sum(file.applied.has(number, Batch(0, 0, batch)) for batch in range(4))
        assert version == count, "a file lists other batches than it contains"
        assert set(values) == {-float(count)}, "a file contains a mixture of two versions"


def _pserver(mode: Mode) -> Pserver:
    pserver = Pserver(MemoryStorage(), mode, specs=SPECS, momentum=0.0)
    pserver.push(0)
    return pserver


def pushing(run: Run) -> None:
    """A file contains exactly the batches that it lists, although pushes go on while it is made."""
    pserver = _pserver(Async())

    run.threads(lambda: pserver.push(1), lambda: pserver.order(1))
    _wait(run, pserver)


def at_a_round(run: Run) -> None:
    """A file that is ordered for a round is made as soon as this round opens."""
    pserver = _pserver(Sync(reduce="sum"))
    pserver.order(1, at_round=2)

    run.threads(lambda: pserver.push(1, base=1))
    _wait(run, pserver)
    assert {version for _, version, _ in _written[-1]["c-1/shard-0-1.arrow"].blocks} == {2}


def replacing(run: Run) -> None:
    """The file of the newest order is sound, although the order before it uses the same memory."""
    pserver = _pserver(Async())
    pserver.order(1)

    def order() -> None:
        pserver.push(1)
        pserver.order(2)

    run.threads(order)
    _wait(run, pserver)
    progress = pserver.snapshots.progress
    assert progress is not None
    assert progress.order.number == 2


@pytest.mark.parametrize("program", [pushing, at_a_round, replacing])
def test_a_file_contains_exactly_the_batches_that_it_lists(program: Any) -> None:
    assert explore(program, MODULES, deviations=2 if program is pushing else 1).is_complete


@pytest.mark.parametrize(
    ("program", "flaw"),
    [
        (
            replacing,
            bug(
                "a file is reported although its memory was filled for a newer one",
                swaps("domain.checkpoint.snapshot:PserverSnapshots._move", "progress.order != self._newest", "False"),
            ),
        ),
        (
            pushing,
            bug(
                "a push does not copy first",
                drops("pserver.cuts.copying:Copying.carry_out", "span.cut(copies, effect)"),
            ),
        ),
        (
            pushing,
            bug(
                "a block is copied without its lock",
                swaps(
                    "pserver.cuts.copying:Copying.copy_one",
                    "with held.locked(held.store(number), number) as span:",
                    "for span in [held.store(number).span(number)]:",
                ),
            ),
        ),
        (
            at_a_round,
            bug(
                "a due block wakes nobody",
                drops("pserver.cuts.copier:Copier.note_due", "self._changed.notify_all()"),
            ),
        ),
    ],
    ids=lambda value: getattr(value, "what", ""),
)
def test_a_file_with_other_content_is_found(program: Any, flaw: Planted) -> None:
    finds(flaw, program, MODULES)
