"""Mutation operators for guards of the domain: those of cosmic-ray, and three that it lacks.

A mutant differs from the product by one token or one negation: a condition is negated, a comparison includes or
excludes its boundary or is reversed, ``and`` becomes ``or``, a ``not`` is removed, or a compared number is one more or
one less. Expressions in messages, in ``assert`` statements and in checks of invariants are not changed.
"""

from __future__ import annotations

import ast
import gc
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType

import parso
from cosmic_ray.ast import ast_nodes, get_ast, is_number
from cosmic_ray.operators.boolean_replacer import ReplaceAndWithOr, ReplaceOrWithAnd
from cosmic_ray.operators.number_replacer import NumberReplacer
from cosmic_ray.operators.operator import Example, Operator
from cosmic_ray.plugins import get_operator
from parso.python.tree import IfStmt, WhileStmt
from parso.tree import BaseNode, Leaf, NodeOrLeaf

ROOT = Path(__file__).resolve().parents[2]

Position = tuple[int, int]
#: A function's file, qualified name and first line.
Place = tuple[str, str, int]
Functions = dict[Place, list[FunctionType]]

#: cosmic-ray can replace every comparison by every other one. Typical mistakes are wrong boundaries and negations.
COMPARISONS = (
    "Eq_NotEq", "NotEq_Eq", "Is_IsNot", "IsNot_Is",
    "Lt_LtE", "Lt_GtE", "LtE_Lt", "LtE_Gt", "Gt_GtE", "Gt_LtE", "GtE_Gt", "GtE_Lt",
)  # fmt: skip


class NegateCondition(Operator):
    """Negation of conditions that are neither comparisons nor negated, which other operators cover.

    cosmic-ray's ``AddNot`` sees neither elif nor the filter of a comprehension, and negates only the first part of
    ``a and b``.
    """

    @staticmethod
    def _conditions(node: NodeOrLeaf) -> Iterator[int]:
        """Return the indices of conditions among the node's children."""
        places: list[int] = []
        if isinstance(node, IfStmt | WhileStmt):
            places = [place + 1 for place, child in enumerate(node.children) if child in {"if", "elif", "while"}]
        elif node.type == "comp_if":
            places = [1]
        elif node.type == "test":  # A if B else C
            places = [2]
        yield from (place for place in places if node.children[place].type not in {"comparison", "not_test"})

    def mutation_positions(self, node: NodeOrLeaf) -> Iterator[tuple[Position, Position]]:
        for place in self._conditions(node):
            condition = node.children[place]
            yield condition.start_pos, condition.end_pos

    def mutate(self, node: NodeOrLeaf, index: int) -> NodeOrLeaf:
        place = list(self._conditions(node))[index]
        node.children[place] = parso.parse(f" not ({node.children[place].get_code().strip()})")
        return node

    @classmethod
    def examples(cls) -> tuple[Example, ...]:
        return (
            Example("if a or b: pass", "if not (a or b): pass"),
            Example("[x for x in y if x]", "[x for x in y if not (x)]"),
        )


class ReplaceMembership(Operator):
    """Exchange of ``in`` and ``not in``."""

    @staticmethod
    def _operators(node: NodeOrLeaf) -> Iterator[int]:
        if node.type == "comparison":
            for index in range(1, len(node.children), 2):
                if " ".join(node.children[index].get_code().split()) in {"in", "not in"}:
                    yield index

    def mutation_positions(self, node: NodeOrLeaf) -> Iterator[tuple[Position, Position]]:
        for index in self._operators(node):
            yield node.children[index].start_pos, node.children[index].end_pos

    def mutate(self, node: NodeOrLeaf, index: int) -> NodeOrLeaf:
        place = list(self._operators(node))[index]
        is_negated = "not" in node.children[place].get_code()
        node.children[place] = parso.parse(" in" if is_negated else " not in")
        return node

    @classmethod
    def examples(cls) -> tuple[Example, ...]:
        return (Example("a in b", "a not in b"), Example("a not in b", "a in b"))


class ReplaceComparedNumber(NumberReplacer):
    """Increment or decrement of a number that is an operand of a comparison."""

    def mutation_positions(self, node: NodeOrLeaf) -> Iterator[tuple[Position, Position]]:
        if is_number(node) and node.parent is not None and node.parent.type == "comparison":
            yield from super().mutation_positions(node)


def _operators() -> dict[str, Operator]:
    operators: dict[str, Operator] = {
        "negate": NegateCondition(),
        "and to or": ReplaceAndWithOr(),
        "or to and": ReplaceOrWithAnd(),
        "drop not": get_operator("core/ReplaceUnaryOperator_Delete_Not")(),
        "membership": ReplaceMembership(),
        "number": ReplaceComparedNumber(),
    }
    for name in COMPARISONS:
        operators[name] = get_operator(f"core/ReplaceComparisonOperator_{name}")()
    return operators


OPERATORS = _operators()


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change of one module."""

    path: str
    #: Dotted name of the outermost function, with its class; "" outside of functions.
    function: str
    operator: str
    #: First and last changed line, counted from 1.
    lines: tuple[int, int]
    #: First changed line before and after the change, without indentation.
    before: str
    after: str
    source: str

    @property
    def key(self) -> tuple[str, str, str, str]:
        """Key that identifies the mutant even if its lines move."""
        return (self.path, self.function, self.before, self.after)


def mutants_of(path: str, source: str) -> Iterator[Mutant]:
    """Return all mutants of one module, in the order of its lines."""
    spared = _spared(ast.parse(source))
    tree = get_ast(source)
    found = [
        (start, end, name, node, index)
        for node in ast_nodes(tree)
        for name, operator in OPERATORS.items()
        for index, (start, end) in enumerate(operator.mutation_positions(node))
        if not any(first <= start and end <= last for first, last in spared)
    ]
    for start, end, name, node, index in sorted(found, key=lambda each: each[:3]):
        mutated = _mutated(tree, node, OPERATORS[name], index)
        before, after = _changed_line(source, mutated)
        yield Mutant(path, _function_of(node), name, (start[0], end[0]), before, after, mutated)


def _mutated(tree: BaseNode, node: NodeOrLeaf, operator: Operator, index: int) -> str:
    """Return the code of the tree with one change, and restore the tree."""
    siblings = node.parent.children
    kept = [(each.children, list(each.children)) for each in (node.parent, node) if isinstance(each, BaseNode)]
    leaves = [(leaf, leaf.value) for leaf in ast_nodes(node) if isinstance(leaf, Leaf)]
    # Compare by identity, because equal keywords are equal nodes.
    place = next(place for place, sibling in enumerate(siblings) if sibling is node)
    siblings[place] = operator.mutate(node, index)
    code = str(tree.get_code())
    for children, before in kept:
        children[:] = before
    for leaf, value in leaves:
        leaf.value = value
    return code


def _changed_line(source: str, mutated: str) -> tuple[str, str]:
    for before, after in zip(source.splitlines(), mutated.splitlines(), strict=True):
        if before != after:
            return before.strip(), after.strip()
    raise AssertionError("the mutant is the product")


def _function_of(node: NodeOrLeaf) -> str:
    names: list[str] = []
    while node is not None:
        if node.type == "funcdef":
            names = [node.name.value]
        elif node.type == "classdef" and names:
            names.insert(0, node.name.value)
        node = node.parent
    return ".".join(names)


def _spared(tree: ast.Module) -> list[tuple[Position, Position]]:
    """Return nodes that are not changed.

    These are messages, asserts, ``check()``, code that only type checkers see, and conditions of marks.
    """
    spared: list[ast.AST] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert | ast.JoinedStr | ast.Raise):
            spared.append(node)
        elif isinstance(node, ast.FunctionDef) and node.name.startswith(("check", "_check")):
            # A branch that raises is a guard.
            if any(isinstance(inner, ast.Assert) for inner in ast.walk(node)):
                spared.append(node)
        elif isinstance(node, ast.If) and (ast.unparse(node.test) == "TYPE_CHECKING" or _only_marks(node)):
            spared.append(node)
    return [((node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)) for node in spared]


def _only_marks(node: ast.If) -> bool:
    """True if the statement only calls ``sometimes``."""
    return all(ast.unparse(each).startswith("sometimes(") for each in (*node.body, *node.orelse))


def functions_of(paths: list[Path]) -> Functions:
    """Return the loaded functions of these files, including decorated ones."""
    functions: Functions = defaultdict(list)
    files = {str(path) for path in paths}
    for thing in gc.get_objects():
        if isinstance(thing, FunctionType) and thing.__code__.co_filename in files:
            code = thing.__code__
            functions[code.co_filename, code.co_qualname, code.co_firstlineno].append(thing)
    return functions


def change(mutant: Mutant, functions: Functions) -> None:
    """Install the mutant's code in the function that it changes."""
    file = str(ROOT / mutant.path)
    is_found = False
    for code in _codes(compile(mutant.source, file, "exec", dont_inherit=True)):
        if code.co_qualname == mutant.function:
            for function in functions[file, code.co_qualname, code.co_firstlineno]:
                function.__code__ = code
                is_found = True
    assert is_found, "the mutant's function is not loaded"


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def described(mutant: Mutant) -> str:
    """Return a description for people."""
    return f"{mutant.path}:{mutant.lines[0]} {mutant.function}\n    - {mutant.before}\n    + {mutant.after}"
