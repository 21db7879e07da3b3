"""The expressions of a recipe: Python's syntax with a few functions and three kinds of values.

    arr_delay > 15
    known(dep_time) and origin in ("EWR", "JFK")
    hour + minute / 60

If an operand of a comparison or a sum is missing, the result is missing; `and`, `or` and `not`
follow SQL's three-valued logic. Division by zero gives a missing value. All operations have results
that IEEE 754 defines to the last bit, so that all engines agree.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from paceline.errors import BadRequest, UnknownName

Kind = Literal["number", "text", "boolean", "something else"]

BINARY = {
    ast.Add: "add",
    ast.Sub: "subtract",
    ast.Mult: "multiply",
    ast.Div: "divide",
    ast.FloorDiv: "floor_divide",
    ast.Mod: "modulo",
}
COMPARE = {
    ast.Eq: "equal",
    ast.NotEq: "differs",
    ast.Lt: "less",
    ast.LtE: "at_most",
    ast.Gt: "greater",
    ast.GtE: "at_least",
}

# name: (kinds of the arguments, kind of the result)
# "any" is any kind, "same" is the kind of the second argument.
FUNCTIONS: dict[str, tuple[tuple[str, ...], str]] = {
    "missing": (("any",), "boolean"),
    "known": (("any",), "boolean"),
    "floor": (("number",), "number"),
    "abs": (("number",), "number"),
    "lower": (("text",), "text"),
    "when": (("boolean", "any", "same"), "same"),
    "weekday": (("number", "number", "number"), "number"),
    "dayofyear": (("number", "number", "number"), "number"),
}
HELP = {
    "missing": "whether the value is missing",
    "known": "whether the value is not missing",
    "floor": "rounded down to an integer",
    "abs": "the absolute value",
    "lower": "in lower case",
    "when": "when(condition, then, otherwise)",
    "weekday": "of (year, month, day): 1 for Monday to 7 for Sunday",
    "dayofyear": "of (year, month, day): 1 to 366",
}


# The operations that the expressions of every engine overload.
OVERLOADED: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "subtract": operator.sub,
    "multiply": operator.mul,
    "equal": operator.eq,
    "differs": operator.ne,
    "less": operator.lt,
    "at_most": operator.le,
    "greater": operator.gt,
    "at_least": operator.ge,
    "and": operator.and_,
    "or": operator.or_,
    "not": operator.invert,
}


class Operations(Protocol):
    """How an engine builds its own expressions."""

    def column(self, name: str) -> Any: ...
    def constant(self, value: float | str | bool) -> Any: ...
    def apply(self, operation: str, *arguments: Any) -> Any: ...


@dataclass(frozen=True)
class Expression:
    """An expression as text, and its syntax tree."""

    text: str
    tree: ast.expr

    @classmethod
    def parse(cls, text: str, where: str) -> Expression:
        try:
            tree = ast.parse(str(text).strip(), mode="eval").body
        except (SyntaxError, ValueError) as error:
            raise BadRequest(
                f"{where}: {text!r} is not an expression: {getattr(error, 'msg', error)}"
            ) from None
        return cls(str(text), tree)

    @property
    def columns(self) -> frozenset[str]:
        functions = {id(n.func) for n in ast.walk(self.tree) if isinstance(n, ast.Call)}
        return frozenset(
            n.id for n in ast.walk(self.tree) if isinstance(n, ast.Name) and id(n) not in functions
        )

    def kind(self, kinds: Mapping[str, Kind], where: str) -> Kind:
        """Return the kind of the result. Refuse unknown columns and operands of a wrong kind."""
        return _Builder(_Nothing(), kinds, f"{where}: {self.text!r}").build(self.tree)[0]

    def build(self, operations: Operations, kinds: Mapping[str, Kind]) -> Any:
        return _Builder(operations, kinds, repr(self.text)).build(self.tree)[1]


class _Nothing:
    """Operations that build nothing, to check an expression only."""

    def column(self, name: str) -> None:
        return None

    def constant(self, value: float | str | bool) -> None:
        return None

    def apply(self, operation: str, *arguments: Any) -> None:
        return None


class _Builder:
    """Walk a syntax tree, check the kinds of its operands, and build an engine's expression."""

    def __init__(self, operations: Operations, kinds: Mapping[str, Kind], where: str) -> None:
        self.operations, self.kinds, self.where = operations, kinds, where

    def build(self, node: ast.expr) -> tuple[Kind, Any]:
        for kind, how in _NODES.items():
            if isinstance(node, kind):
                return how(self, node)
        raise BadRequest(f"{self.where}: {ast.unparse(node)!r} is not allowed in an expression")

    def _wanted(self, node: ast.expr, kind: str) -> Any:
        found, value = self.build(node)
        if kind not in ("any", found):
            raise BadRequest(
                f"{self.where}: {ast.unparse(node)!r} is a {found}, not a"
                f" {kind}{_hint(node, found, kind)}"
            )
        return value

    def _name(self, node: ast.Name) -> tuple[Kind, Any]:
        if node.id not in self.kinds:
            raise UnknownName(f"column in {self.where}:", node.id, self.kinds)
        return self.kinds[node.id], self.operations.column(node.id)

    def _constant(self, node: ast.Constant) -> tuple[Kind, Any]:
        value = node.value
        if isinstance(value, bool):
            return "boolean", self.operations.constant(value)
        if isinstance(value, (int, float)):
            return "number", self.operations.constant(float(value))
        if isinstance(value, str):
            return "text", self.operations.constant(value)
        raise BadRequest(f"{self.where}: {value!r} is not a number, text, True or False")

    def _arithmetic(self, node: ast.BinOp) -> tuple[Kind, Any]:
        name = BINARY.get(type(node.op))
        if name is None:
            raise BadRequest(f"{self.where}: the arithmetic operators are + - * / // and %")
        left, right = self._wanted(node.left, "number"), self._wanted(node.right, "number")
        return "number", self.operations.apply(name, left, right)

    def _sign(self, node: ast.UnaryOp) -> tuple[Kind, Any]:
        if isinstance(node.op, ast.Not):
            return "boolean", self.operations.apply("not", self._wanted(node.operand, "boolean"))
        if isinstance(node.op, ast.USub):
            zero = self.operations.constant(0.0)
            return "number", self.operations.apply(
                "subtract", zero, self._wanted(node.operand, "number")
            )
        raise BadRequest(f"{self.where}: the unary operators are - and not")

    def _logic(self, node: ast.BoolOp) -> tuple[Kind, Any]:
        name = "and" if isinstance(node.op, ast.And) else "or"
        first, *others = [self._wanted(v, "boolean") for v in node.values]
        for other in others:
            first = self.operations.apply(name, first, other)
        return "boolean", first

    def _comparison(self, node: ast.Compare) -> tuple[Kind, Any]:
        result: Any = None
        left = node.left
        for sign, right in zip(node.ops, node.comparators, strict=True):
            kind, value = self.build(left)
            if isinstance(sign, (ast.In, ast.NotIn)):
                if not isinstance(right, (ast.Tuple, ast.List)) or not right.elts:
                    raise BadRequest(f"{self.where}: write a list after `in`: in ('a', 'b')")
                each = [
                    self.operations.apply("equal", value, self._wanted(e, kind)) for e in right.elts
                ]
                one = each[0]
                for other in each[1:]:
                    one = self.operations.apply("or", one, other)
                if isinstance(sign, ast.NotIn):
                    one = self.operations.apply("not", one)
            else:
                name = COMPARE.get(type(sign))
                if name is None:
                    raise BadRequest(
                        f"{self.where}: the comparisons are == != < <= > >= in; missing(x) and"
                        " known(x) test for a missing value"
                    )
                one = self.operations.apply(name, value, self._wanted(right, kind))
            result = one if result is None else self.operations.apply("and", result, one)
            left = right
        return "boolean", result

    def _call(self, node: ast.Call) -> tuple[Kind, Any]:
        if not isinstance(node.func, ast.Name) or node.keywords:
            raise BadRequest(
                f"{self.where}: {ast.unparse(node)!r}: write a function's name and its arguments"
            )
        name = node.func.id
        if name not in FUNCTIONS:
            raise UnknownName(f"function in {self.where}:", name, FUNCTIONS)
        wanted, gives = FUNCTIONS[name]
        if len(node.args) != len(wanted):
            raise BadRequest(
                f"{self.where}: {name} has {len(wanted)} argument(s), not {len(node.args)}"
                f" ({HELP[name]})"
            )
        values, second = [], gives
        for place, (argument, kind) in enumerate(zip(node.args, wanted, strict=True)):
            values.append(self._wanted(argument, second if kind == "same" else kind))
            if place == 1:
                second = self.build(argument)[0]
        result: Any = second if gives == "same" else gives
        return result, self.operations.apply(name, *values)


_NODES: dict[type[ast.expr], Callable[[_Builder, Any], tuple[Kind, Any]]] = {
    ast.Name: _Builder._name,
    ast.Constant: _Builder._constant,
    ast.BinOp: _Builder._arithmetic,
    ast.UnaryOp: _Builder._sign,
    ast.BoolOp: _Builder._logic,
    ast.Compare: _Builder._comparison,
    ast.Call: _Builder._call,
}


def _hint(node: ast.expr, found: str, wanted: str) -> str:
    if isinstance(node, ast.Name) and found == "text" and wanted == "number":
        return f" (a CSV's columns are text: add {node.id!r} to its `numbers`)"
    return ""
