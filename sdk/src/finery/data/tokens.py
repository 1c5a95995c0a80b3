"""Rows of token ids. Raises `RowError` with the first problem."""

from __future__ import annotations

from typing import Any

from finery.data.problems import MISSING, RowError, kind, wrong_type

IGNORED = -100
MAX_ID = 2**31 - 1


def read_tokens(row: dict[str, Any]) -> tuple[tuple[int, ...], tuple[bool, ...]]:
    """The ids, and which of them carry loss."""
    ids = _integers(row.get("input_ids", MISSING), "input_ids")
    if not ids:
        raise RowError(
            "invalid_input_ids", "input_ids", "expected at least one token id, found none", "Leave the row out."
        )
    if min(ids) < 0 or max(ids) > MAX_ID:
        n = next(n for n, one in enumerate(ids) if not 0 <= one <= MAX_ID)
        message = f"expected token ids from 0 to {MAX_ID}, found {str(ids[n])[:30]}"
        raise RowError("invalid_input_ids", f"input_ids[{n}]", message, "Write ids of the model's tokenizer.")
    _check_mask(row, len(ids))
    return tuple(ids), _trained(row, ids)


def _trained(row: dict[str, Any], ids: list[int]) -> tuple[bool, ...]:
    if row.get("labels") is None or row["labels"] == ids:
        return (True,) * len(ids)
    labels = _integers(row["labels"], "labels")
    if len(labels) != len(ids):
        message = f"expected {len(ids)} labels, as many as input_ids, found {len(labels)}"
        raise RowError("invalid_labels", "labels", message, "Labels are not shifted: one for each id, at its place.")
    for n, (label, one) in enumerate(zip(labels, ids, strict=True)):
        if label not in (one, IGNORED):
            message = f"expected {one}, the id at this place, or {IGNORED}, found {str(label)[:30]}"
            raise RowError(
                "invalid_labels", f"labels[{n}]", message, "Labels are not shifted, and say only what is trained."
            )
    return tuple(label != IGNORED for label in labels)


def _check_mask(row: dict[str, Any], length: int) -> None:
    if row.get("attention_mask") is None:
        return
    mask = _integers(row["attention_mask"], "attention_mask")
    if mask != [1] * length:
        message = f"expected {length} ones, as many as input_ids, found {len(mask)} numbers that are not all 1"
        raise RowError(
            "invalid_attention_mask", "attention_mask", message, "Leave padding out of the row, and the mask too."
        )


def _integers(value: Any, path: str) -> list[int]:
    if not isinstance(value, list):
        raise wrong_type(path, "a list of integers", value)
    if set(map(type, value)) - {int}:
        n = next(n for n, one in enumerate(value) if type(one) is not int)
        found = f"{value[n]!r}"[:30] if isinstance(value[n], float) else kind(value[n])
        raise RowError("wrong_type", f"{path}[{n}]", f"expected an integer, found {found}", "Write an integer there.")
    return value
