"""Shards, cuts, and packed batches of prepared rows."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from finery_gpu_workers.data import prepared
from finery_gpu_workers.data.prepared import INDEX, Prepared, SetWriter
from finery_gpu_workers.data.tokens import TokenRow
from finery_gpu_workers.errors import WorkerError
from finery_gpu_workers.methods.sft import packed_batch
from finery_testing.tiny import IM_END


def row(tokens: list[int], trained: list[int]) -> TokenRow:
    mask = np.zeros(len(tokens), dtype=np.uint8)
    mask[trained] = 1
    return TokenRow(np.array(tokens, dtype=np.int32), mask)


def f_chat(answer: str = "ok") -> TokenRow:
    """Positions as in the fixture: the answer starts at 21 and ends with its end of turn."""
    header = [259, *b"user\n", *b"hi", 260, 10, 259, *b"assistant\n"]
    return row([*header, *answer.encode(), IM_END, 10], list(range(21, 21 + len(answer) + 1)))


def write(folder: Path, rows: list[TokenRow]) -> Prepared:
    writer = SetWriter(folder, "train")
    for number, content in enumerate(rows, 1):
        writer.add(content, number)
    (folder / INDEX).write_text(json.dumps({"sets": {"train": writer.close()}}))
    return prepared.load(folder)


def test_rows_come_back_as_they_were_over_several_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepared, "SHARD_TOKENS", 40)
    rows = [f_chat("a" * n) for n in range(1, 8)]
    data = write(tmp_path, rows)
    assert len(data.train.shards) == 4
    assert data.train.lengths.tolist() == [len(r.tokens) for r in rows]
    assert data.train.trained.tolist() == [r.trained for r in rows]
    for n, expected in enumerate(rows):
        found = data.train.row(n)
        assert found.tokens.tolist() == expected.tokens.tolist()
        assert found.mask.tolist() == expected.mask.tolist()
    assert np.concatenate([shard["lines"] for shard in data.train.shards]).tolist() == [*range(1, 8)]


def test_a_changed_shard_is_refused(tmp_path: Path) -> None:
    write(tmp_path, [f_chat()])
    shard = tmp_path / "train-00000.safetensors"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    with pytest.raises(WorkerError, match=r"train-00000\.safetensors: expected sha256"):
        prepared.load(tmp_path)


def test_a17_the_end_of_turn_is_trained_whatever_the_padding_token_is(tmp_path: Path) -> None:
    """Rows of 25 and 23 tokens are packed: there is no padding, so no id can be taken for it."""
    data = write(tmp_path, [f_chat(), f_chat("")])
    batch = packed_batch(data.train, np.array([0, 1]))
    assert batch.lengths == (25, 23)
    assert len(batch.tokens) == 48
    assert batch.targets[batch.weights > 0].tolist() == [ord("o"), ord("k"), IM_END, IM_END]


def test_a20_positions_start_anew_and_no_row_predicts_the_next(tmp_path: Path) -> None:
    data = write(tmp_path, [row([7, 8, 9], [1, 2]), row([5, 6], [1])])
    batch = packed_batch(data.train, np.array([0, 1]))
    assert batch.positions.tolist() == [0, 1, 2, 0, 1]
    assert batch.weights.tolist() == [1.0, 1.0, 0.0, 1.0, 0.0]
    assert batch.targets[batch.weights > 0].tolist() == [8, 9, 6]
    assert batch.weights.dtype == torch.float32


def test_the_first_token_of_a_row_is_never_a_target_of_the_row_before(tmp_path: Path) -> None:
    """Even where a mask would have it so."""
    data = write(tmp_path, [row([7, 8], [1]), row([5, 6], [0, 1])])
    assert packed_batch(data.train, np.array([0, 1])).weights.tolist() == [1.0, 0.0, 1.0, 0.0]
