"""Money is never a float: prices are `Decimal` US dollars per million units, amounts whole nano-dollars.

One nano-dollar is 1e-9 USD. `cumulative_nanodollars` rounds a running total once, half-even; what is
booked for one more record is the new rounded total minus what was booked before, so that rounding
errors never add up.
"""

from __future__ import annotations

from decimal import ROUND_HALF_EVEN, Decimal
from typing import Annotated

from pydantic import PlainSerializer, PlainValidator


def _decimal(value: object) -> Decimal:
    if isinstance(value, Decimal):
        result = value
    elif isinstance(value, (str, int)) and not isinstance(value, bool):
        try:
            result = Decimal(value)
        except ArithmeticError:
            raise ValueError(f"expected a decimal number as text, found {value!r}") from None
    else:
        raise ValueError(f"expected a decimal number as text, found {type(value).__name__}; money is never a float")
    if not result.is_finite():
        raise ValueError(f"expected a finite amount, found {value!r}")
    return result


def plain(amount: Decimal) -> str:
    """`Decimal` as text without exponent or trailing zeros: 0.4938268, 12, 0."""
    text = format(amount, "f")
    return text.rstrip("0").rstrip(".") if "." in text else text


Usd = Annotated[Decimal, PlainValidator(_decimal), PlainSerializer(plain, return_type=str, when_used="json")]
"""US dollars as `Decimal`; on the wire decimal text."""

_NANO = Decimal(10) ** 9
_MILLION = Decimal(10) ** 6


def cumulative_nanodollars(units: int, price_per_million: Decimal) -> int:
    """round_half_even(units * price / 1e6 * 1e9): the exact total in whole nano-dollars."""
    return int((units * price_per_million * _NANO / _MILLION).to_integral_value(ROUND_HALF_EVEN))


def usd(nanodollars: int) -> Decimal:
    """Whole nano-dollars as exact US dollars."""
    return Decimal(nanodollars) / _NANO
