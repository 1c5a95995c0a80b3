"""Formulas of graders: read as Python reads them, computed as Python computes them, and nothing else."""

from __future__ import annotations

import math
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from finery.formula import MAX_DEPTH, MAX_LENGTH, FormulaError, evaluate, parse

VALUES = {"a": 3.0, "b": 0.5, "min": 7.0, "_x1": -2.0}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", 1.0),
        (" a ", 3.0),
        ("0.7 * a + 0.3 * b", 2.25),
        ("a - b - 1", 1.5),
        ("8 / 2 / 2", 2.0),
        ("-2 ** 2", -4.0),
        ("2 ** 3 ** 2", 512.0),
        ("2 ** -1", 0.5),
        ("(1 + 2) * 3", 9.0),
        ("--3 - +2", 1.0),
        ("min(a, b, 2) + max(a, 4)", 4.5),
        ("min(a)", 3.0),
        ("min + 1", 8.0),
        ("abs(_x1) + floor(1.7) + ceil(1.2)", 5.0),
        ("exp(0) + sqrt(16) + log(1)", 5.0),
        ("1.5e1 + .5 + 1. + 2E-1", 16.7),
        ("(((a)))", 3.0),
    ],
)
def test_a_formula_has_the_value_that_it_has_by_hand(text: str, value: float) -> None:
    assert evaluate(parse(text), VALUES) == pytest.approx(value, rel=1e-15)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected a number, a name or a bracket, found the end"),
        ("1 +", "found the end"),
        ("1 2", "expected an operator or the end, found '2' at character 3"),
        ("a b", "found 'b' at character 3"),
        ("(1", r"expected '\)', found the end"),
        ("1)", r"found '\)' at character 2"),
        ("pow(1, 2)", "expected one of the functions min, max, abs"),
        ("__import__('os')", 'found "\'" at character 12'),
        ("a.b", "found '.' at character 2"),
        ("a[0]", "found '\\[' at character 2"),
        ("min()", "expected a number, a name or a bracket"),
        ("sqrt(1, 2)", "expected one argument of sqrt, found 2"),
        ("1e999", "below 1.8e308"),
        ("a if b else 1", "found 'if' at character 3"),
        ("a // b", "found '/' at character 4"),
        ("a % b", "found '%' at character 3"),
        ("lambda: 1", "found ':'"),
        ("ｆ + 1", "found 'ｆ' at character 1"),
        ("1" * (MAX_LENGTH + 1), "at most 1024 characters"),
        ("(" * (MAX_DEPTH + 2) + "1" + ")" * (MAX_DEPTH + 2), "inside each other"),
        ("-" * 1000 + "1", "inside each other"),
        ("2" + "**2" * 300, "inside each other"),
    ],
)
def test_what_is_no_formula_is_refused_with_its_place(text: str, message: str) -> None:
    with pytest.raises(FormulaError, match=message):
        parse(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1 / 0", "divisor other than 0"),
        ("sqrt(0 - 1)", "none of sqrt of -1"),
        ("log(0)", "none of log"),
        ("exp(1000)", "none of exp"),
        ("(0 - 8) ** 0.5", r"none of \*\* of -8, 0.5"),
        ("1e308 * 10", r"overflow of \*"),
        ("c + 1", "expected a number for c, found none"),
        ("nan + 1", "expected a finite number for nan"),
    ],
)
def test_a_formula_without_a_value_says_why(text: str, message: str) -> None:
    with pytest.raises(FormulaError, match=message):
        evaluate(parse(text), {**VALUES, "nan": math.nan})


def test_names_are_those_that_need_numbers() -> None:
    assert parse("min(a, b) + min * 2").names == {"a", "b", "min"}


def test_a_long_sum_needs_no_deep_stack_and_a_formula_can_be_sent() -> None:
    expression = parse("+".join(["1"] * 512))
    assert evaluate(pickle.loads(pickle.dumps(expression)), {}) == 512.0


NUMBERS = st.floats(0.125, 8).map(lambda value: f"{value:.3f}")


def _grown(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    pair = st.tuples(inner, st.sampled_from(["+", "-", "*", "/", "**"]), inner).map(" ".join)
    return st.one_of(pair, inner.map("({})".format), inner.map("-{}".format), inner.map("abs({})".format))


@given(st.recursive(st.one_of(NUMBERS, st.sampled_from(["a", "b"])), _grown, max_leaves=12))
def test_it_agrees_with_python(text: str) -> None:
    """The peer is Python's own eval, of texts that we made."""
    expected: Any
    try:
        expected = eval(text, {"__builtins__": {}}, {"a": 3.0, "b": 0.5, "abs": abs})
    except (ZeroDivisionError, OverflowError):
        expected = None
    if isinstance(expected, complex) or (isinstance(expected, float) and not math.isfinite(expected)):
        expected = None
    try:
        found = evaluate(parse(text), VALUES)
    except FormulaError:
        return  # also of a part that has no real value: Python goes on with a complex number
    assert expected is not None
    assert found == pytest.approx(expected, rel=1e-12)
