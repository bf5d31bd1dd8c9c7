"""Every handler of any exception in a server reports the error to whoever depends on the failed operation."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import flightedl

PACKAGE = Path(flightedl.__file__).parent
SERVERS = ("pserver", "master", "coordination", "rpc")
BROAD = {"Exception", "BaseException"}

#: Place of a handler -> what the handler does, so that nobody waits for the failed operation for ever.
REASONS = {
    "coordination/directory.py Directory._replace": "reports the error to the server, which ends",
    "master/checkpointing.py CheckpointStore._sweep": "nothing waits for deletions, and the next sweep repeats them",
    "master/checkpointing.py CheckpointStore._write_manifest": "reports the failure to the core, which retries",
    "master/durable.py DurableState._run": "the master steps down",
    "master/growing.py Growing._run": "the master steps down",
    "master/pservers.py PserverLink._call": "reports to the core that the view may be lost, and raises the error",
    "pserver/readers/feed.py PserverFeed.changes": "frees the answer's place, and raises the error",
    "pserver/steps/line_loop.py LineLoop._serve": "the thread that handles the stream raises the error",
    "pserver/moving/mover.py Mover.look": "the pserver ends, because blocks might have no owner",
    "pserver/service.py PserverService._run": "reports the failure to the core, which ends the process, and raises it",
    "pserver/shard.py Shard._push": "marks the blocks as damaged, and raises the error",
    "rpc/client_streams.py ClientExchange.__enter__": "closes the stream, and raises the error",
    "rpc/client_streams.py ClientExchange.__exit__": "closes the stream, and raises the error",
    "rpc/client_streams.py _closing": "closes the stream, and raises the error",
    "rpc/reuse.py ReusableExchange.use": "ends the stream, and raises the error",
    "rpc/reuse.py ReusableExchange._open": "closes the stream, and raises the error",
    "rpc/service.py Arrivals.start_call": "the caller gets the error",
    "rpc/service.py Service._outgoing": "the caller gets the error",
    "rpc/service.py Service.do_get": "releases the call, and raises the error",
    "rpc/service.py _guarded.guarded": "the caller gets the error",
}


def _is_broad(node: ast.AST) -> bool:
    if isinstance(node, ast.ExceptHandler):
        return node.type is None or bool(BROAD & _names_in(node.type))
    is_call = isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == "suppress"
    return isinstance(node, ast.Call) and is_call and any(BROAD & _names_in(each) for each in node.args)


def _names_in(node: ast.AST) -> set[str]:
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}


def _handlers(node: ast.AST, place: str = "") -> list[tuple[str, ast.AST]]:
    found = [(place, node)] if _is_broad(node) else []
    if isinstance(node, ast.ClassDef | ast.FunctionDef):
        place = f"{place}.{node.name}" if place else node.name
    for child in ast.iter_child_nodes(node):
        found += _handlers(child, place)
    return found


def _only_logs(node: ast.AST) -> bool:
    """True if a handler neither raises an error nor calls anything but a logger."""
    if isinstance(node, ast.Call):
        return True
    inner = [each for statement in getattr(node, "body", ()) for each in ast.walk(statement)]
    calls = [ast.unparse(each.func) for each in inner if isinstance(each, ast.Call)]
    is_raising = any(isinstance(each, ast.Raise) for each in inner)
    return not is_raising and all(call.startswith(("_log.", "str", "repr", "type")) for call in calls)


FOUND = [
    (f"{path.relative_to(PACKAGE)} {place}", node)
    for folder in SERVERS
    for path in sorted((PACKAGE / folder).rglob("*.py"))
    for place, node in _handlers(ast.parse(path.read_text()))
]


def test_each_handler_of_any_exception_in_a_server_has_a_reason() -> None:
    assert {place for place, _ in FOUND} == set(REASONS)


def test_only_a_sweep_of_old_files_continues_after_it_has_logged_any_exception() -> None:
    logging = [place for place, node in FOUND if _only_logs(node)]
    assert logging == ["master/checkpointing.py CheckpointStore._sweep"]


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("try: f()\nexcept Exception: _log.exception('x')", 1),
        ("try: f()\nexcept: pass", 1),
        ("try: f()\nexcept (OSError, BaseException): pass", 1),
        ("with contextlib.suppress(Exception): f()", 1),
        ("try: f()\nexcept OSError: pass", 0),
    ],
)
def test_handlers_are_found(source: str, count: int) -> None:
    found = _handlers(ast.parse(source))
    assert len(found) == count
    assert all(_only_logs(node) for _, node in found)
