"""Formulas over named numbers, as in `0.7 * exact + 0.3 * min(style, 1)`: read once, computed often, never evaluated
as code.

    formula  := product (("+" | "-") product)*
    product  := unary (("*" | "/") unary)*
    unary    := ("+" | "-") unary | power
    power    := atom ("**" unary)?
    atom     := number | name | function "(" formula ("," formula)* ")" | "(" formula ")"

Precedence and association are Python's: `-2 ** 2` is -4, `2 ** 3 ** 2` is 512. A name followed by a bracket is a
function, any other one stands for a number. Pure.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

MAX_LENGTH = 1024
"""Characters of a formula."""
MAX_DEPTH = 50
"""Of brackets, signs and powers inside each other."""

_TOKEN = re.compile(
    r"(?P<number>(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)"
    r"|(?P<name>[A-Za-z_][A-Za-z0-9_]*)|(?P<sign>\*\*|[-+*/(),])",
    re.ASCII,
)
_SPACE = re.compile(r"\s*", re.ASCII)
_FUNCTIONS: dict[str, Callable[..., float]] = {
    "min": min,
    "max": max,
    "abs": abs,
    "floor": lambda value: float(math.floor(value)),
    "ceil": lambda value: float(math.ceil(value)),
    "exp": math.exp,
    "sqrt": math.sqrt,
    "log": math.log,
}
_MANY = ("min", "max")
"""They take any number of arguments, at least one; the others take one."""
_BINARY: dict[str, Callable[[float, float], float]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "**": math.pow,  # a power of a negative number that is not real is an error, not a complex number
}


class FormulaError(ValueError):
    """No formula, or one that has no value for these numbers; the message says what and where."""


@dataclass(frozen=True, slots=True)
class Call:
    """An operator or function, applied to the last `count` values."""

    name: str
    count: int


@dataclass(frozen=True, slots=True)
class Expression:
    """A formula that was read."""

    text: str
    names: frozenset[str]
    """The names that it needs numbers for."""
    program: tuple[float | str | Call, ...]
    """In postfix order: a number, a name whose number is meant, or what is done with the values before it."""


def parse(text: str) -> Expression:
    """Raises `FormulaError` for what is no formula, naming the place."""
    if len(text) > MAX_LENGTH:
        raise FormulaError(f"expected at most {MAX_LENGTH} characters, found {len(text)}")
    reader = _Reader(text, _tokens(text))
    reader.formula(0)
    if reader.kind != "end":
        reader.fail("an operator or the end")
    names = frozenset(part for part in reader.program if isinstance(part, str))
    return Expression(text, names, tuple(reader.program))


def evaluate(expression: Expression, values: Mapping[str, float]) -> float:
    """The formula's value, finite.

    Raises `FormulaError` where there is none: a name without a number, a division by zero, the root or logarithm of
    what has none, an overflow.
    """
    stack: list[float] = []
    for part in expression.program:
        if isinstance(part, Call):
            arguments = stack[-part.count :]
            del stack[-part.count :]
            stack.append(_apply(part, arguments))
        elif isinstance(part, str):
            stack.append(_value(part, values))
        else:
            stack.append(part)
    [result] = stack
    return result


def _apply(call: Call, arguments: Sequence[float]) -> float:
    try:
        result = _function(call)(*arguments)
    except ZeroDivisionError:
        raise FormulaError("expected a divisor other than 0, found 0") from None
    except (ValueError, OverflowError):
        shown = ", ".join(f"{argument:g}" for argument in arguments)
        raise FormulaError(f"expected a finite value, found none of {call.name} of {shown}") from None
    if not math.isfinite(result):
        raise FormulaError(f"expected a finite value, found an overflow of {call.name}")
    return result


def _function(call: Call) -> Callable[..., float]:
    if call.name in _MANY:
        return lambda *values: _FUNCTIONS[call.name](values)
    if call.name == "-" and call.count == 1:
        return operator.neg
    return _BINARY[call.name] if call.name in _BINARY else _FUNCTIONS[call.name]


def _value(name: str, values: Mapping[str, float]) -> float:
    if name not in values:
        raise FormulaError(f"expected a number for {name}, found none")
    value = float(values[name])
    if not math.isfinite(value):
        raise FormulaError(f"expected a finite number for {name}, found {value}")
    return value


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str
    """`number`, `name`, the sign itself, or `end`."""
    text: str
    at: int
    """From 1."""


def _tokens(text: str) -> list[_Token]:
    tokens, place = [], 0
    while (place := _skip(text, place)) < len(text):
        match = _TOKEN.match(text, place)
        if match is None:
            raise FormulaError(
                f"expected a number, a name, an operator (+ - * / **) or a bracket, found {text[place]!r} at character "
                f"{place + 1}"
            )
        kind = str(match.lastgroup)
        tokens.append(_Token(match[kind] if kind == "sign" else kind, match[kind], place + 1))
        place = match.end()
    return [*tokens, _Token("end", "", len(text) + 1)]


def _skip(text: str, place: int) -> int:
    match = _SPACE.match(text, place)
    return match.end() if match else place


class _Reader:
    """Recursive descent; `program` grows in postfix order."""

    def __init__(self, text: str, tokens: Sequence[_Token]) -> None:
        self.text, self.tokens, self.place = text, tokens, 0
        self.program: list[float | str | Call] = []

    @property
    def token(self) -> _Token:
        return self.tokens[self.place]

    @property
    def kind(self) -> str:
        return self.token.kind

    def fail(self, expected: str) -> NoReturn:
        token = self.token
        found = "the end" if token.kind == "end" else f"{token.text[:40]!r} at character {token.at}"
        raise FormulaError(f"expected {expected}, found {found}")

    def take(self) -> _Token:
        token = self.token
        self.place += 1
        return token

    def expect(self, kind: str) -> None:
        if self.kind != kind:
            self.fail(repr(kind))
        self.place += 1

    def formula(self, depth: int) -> None:
        self.chain(("+", "-"), self.product, depth)

    def product(self, depth: int) -> None:
        self.chain(("*", "/"), self.unary, depth)

    def chain(self, signs: tuple[str, str], part: Callable[[int], None], depth: int) -> None:
        part(depth)
        while self.kind in signs:
            sign = self.take().text
            part(depth)
            self.program.append(Call(sign, 2))

    def unary(self, depth: int) -> None:
        if depth > MAX_DEPTH:
            raise FormulaError(f"expected at most {MAX_DEPTH} brackets and signs inside each other, found more")
        if self.kind == "-":
            self.take()
            self.unary(depth + 1)
            self.program.append(Call("-", 1))
        elif self.kind == "+":
            self.take()
            self.unary(depth + 1)
        else:
            self.power(depth)

    def power(self, depth: int) -> None:
        self.atom(depth)
        if self.kind == "**":
            self.take()
            self.unary(depth + 1)
            self.program.append(Call("**", 2))

    def atom(self, depth: int) -> None:
        if self.kind == "number":
            self.number()
        elif self.kind == "(":
            self.take()
            self.formula(depth + 1)
            self.expect(")")
        elif self.kind == "name" and self.tokens[self.place + 1].kind == "(":
            self.function(depth)
        elif self.kind == "name":
            self.program.append(self.take().text)
        else:
            self.fail("a number, a name or a bracket")

    def number(self) -> None:
        value = float(self.token.text)
        if not math.isfinite(value):
            self.fail("a number below 1.8e308")
        self.take()
        self.program.append(value)

    def function(self, depth: int) -> None:
        if self.token.text not in _FUNCTIONS:
            self.fail(f"one of the functions {', '.join(_FUNCTIONS)}")
        token = self.take()
        count = self.arguments(depth)
        if token.text not in _MANY and count != 1:
            raise FormulaError(
                f"expected one argument of {token.text}, found {count} at character {token.at}; min and max take more"
            )
        self.program.append(Call(token.text, count))

    def arguments(self, depth: int) -> int:
        self.expect("(")
        self.formula(depth + 1)
        count = 1
        while self.kind == ",":
            self.take()
            self.formula(depth + 1)
            count += 1
        self.expect(")")
        return count
