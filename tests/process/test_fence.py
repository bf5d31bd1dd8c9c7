"""Memory order between two processes that share memory: the fence instruction exists where processors need it."""

from __future__ import annotations

import platform
import subprocess
import sys

import llvmlite.binding as llvm
import pytest

from flightedl.errors import UnavailableError
from flightedl.process import fence, shared_memory
from flightedl.process.shared_memory import SharedMemory


@pytest.mark.parametrize(
    ("triple", "instruction"),
    [("aarch64-linux-gnu", "dmb\tish\n"), ("x86_64-linux-gnu", "lock"), ("riscv64-linux-gnu", "fence\trw, rw")],
)
def test_the_emitted_code_has_the_instruction(triple: str, instruction: str) -> None:
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    machine = llvm.Target.from_triple(triple).create_target_machine(opt=2)
    assert instruction in machine.emit_assembly(llvm.parse_assembly(fence.SOURCE))


def test_the_compiled_fence_runs_on_this_machine() -> None:
    for _ in range(1000):
        fence.compiled_fence()()


def test_processors_other_than_x86_use_the_compiled_fence(monkeypatch: pytest.MonkeyPatch) -> None:
    fence.memory_fence.cache_clear()
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert fence.memory_fence() is fence.compiled_fence()
    fence.memory_fence.cache_clear()


def test_x86_needs_no_llvm() -> None:
    program = (
        "import sys; from flightedl.process.fence import memory_fence; memory_fence()();"
        "print('llvmlite' in sys.modules)"
    )
    environment = {"PYTHONPATH": ":".join(sys.path)}
    printed = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=True
    ).stdout
    assert printed.strip() == str(platform.machine() not in {"x86_64", "AMD64"})


def test_no_memory_is_shared_without_a_fence(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> fence.Fence:
        raise UnavailableError("there is no memory fence on this system")

    monkeypatch.setattr(shared_memory, "memory_fence", none)
    with pytest.raises(UnavailableError, match="no memory fence"):
        SharedMemory.create(bytes(16))


def test_every_shared_word_is_accessed_with_a_fence(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    monkeypatch.setattr(shared_memory, "memory_fence", lambda: lambda: events.append("fence"))
    memory = SharedMemory.create(bytes(16))

    class Noted:
        """A shared word that records each access."""

        def __init__(self, name: str) -> None:
            self.name = name

        def __getitem__(self, _: int) -> int:
            events.append(f"read {self.name}")
            return 0

        def __setitem__(self, _: int, value: int) -> None:
            events.append(f"write {self.name}")

    memory._consumed, memory._over = Noted("taken"), Noted("over")
    memory.consumed = 1
    assert events == ["fence", "write taken"], "values are read before"
    events.clear()
    assert memory.consumed == 0
    assert events == ["read taken", "fence"], "values are changed behind it"
    events.clear()
    assert not memory.is_over
    assert events == ["fence", "read over"], "values are read before"
    events.clear()
    memory.end()
    assert events == ["write over", "fence"], "values are changed behind it"
