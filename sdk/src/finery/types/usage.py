"""Metered usage."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

from finery.types.base import Resource
from finery.types.money import Usd


class Sku(StrEnum):
    TRAIN_SFT = "train.sft"
    EVAL_SFT = "eval.sft"


class UsageState(StrEnum):
    PROVISIONAL = "provisional"
    """Committed, not yet covered by a checkpoint."""
    BILLABLE = "billable"
    VOID = "void"
    """Never billed: a later attempt repeated the work, or the job ended before a checkpoint covered it."""


GroupBy = Literal["job", "sku", "day"]


class UsageRow(Resource):
    """A sum over usage records. The fields that were not grouped by are None."""

    object: Literal["usage"] = "usage"
    job: str | None = None
    sku: str | None = None
    day: str | None = None
    """YYYY-MM-DD, UTC; a window is [00:00, 24:00)."""
    quantity: int
    """Billable and provisional units."""
    billable: int
    provisional: int
    void: int
    cost: Usd
    """US dollars for `quantity`."""
