"""The decoder against transformers' LlamaForCausalLM, float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from finery_gpu_workers.batch import PackedBatch, pack
from finery_gpu_workers.models import attention
from finery_gpu_workers.models.interface import Model
from finery_gpu_workers.models.load import load_model
from finery_testing.tiny import make_tiny_model

torch.set_num_threads(1)

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
SHAPES: dict[str, dict[str, Any]] = {
    "grouped heads, tied": {},
    "untied": {"tie_word_embeddings": False},
    "one key head": {"num_key_value_heads": 1},
    "as many key heads as heads": {"num_key_value_heads": 4},
    "head_dim not hidden / heads": {"head_dim": 16},
    "llama3 rope": {"rope_parameters": LLAMA3},
    "old rope keys": {"rope_parameters": None, "rope_theta": 300.0},
    "mistral": {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": None},
}


def random_row(length: int, seed: int) -> list[int]:
    return torch.randint(0, 261, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def packed(*lengths: int) -> PackedBatch:
    return pack([(random_row(n, seed), [1.0] * n) for seed, n in enumerate(lengths)])


def logits_of(decoder: Model, batch: PackedBatch) -> Tensor:
    return decoder.logits(decoder.forward(batch.tokens, batch.positions, batch.lengths))


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_equal_those_of_transformers(tmp_path: Path, shape: str) -> None:
    folder = make_tiny_model(tmp_path / "m", 3, **SHAPES[shape])
    ours = load_model(folder, device="cpu", dtype=torch.float32)
    peer = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    batch = packed(200)
    with torch.no_grad():
        expected = peer(batch.tokens[None]).logits[0]
    assert (logits_of(ours, batch) - expected).abs().max() <= 1e-5
    assert expected.std() > 0.1, "logits that are all alike would prove nothing"


@pytest.mark.parametrize("matmul_up_to", [1024, 0], ids=["matmul", "fused"])
@pytest.mark.parametrize("lengths", [(7, 7, 7), (3, 11, 11, 1, 2, 30), (1, 1)])
def test_packed_rows_equal_rows_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lengths: tuple[int, ...], matmul_up_to: int
) -> None:
    monkeypatch.setattr(attention, "_MATMUL_UP_TO", matmul_up_to)
    decoder = load_model(make_tiny_model(tmp_path / "m"), device="cpu", dtype=torch.float32)
    together = logits_of(decoder, packed(*lengths))
    alone = [logits_of(decoder, pack([(random_row(n, seed), [1.0] * n)])) for seed, n in enumerate(lengths)]
    torch.testing.assert_close(together, torch.cat(alone), rtol=1e-5, atol=5e-6)


def test_a_row_does_not_see_its_neighbour(tmp_path: Path) -> None:
    """Another first row of the same length leaves the second row's logits alone, and changes its own."""
    decoder = load_model(make_tiny_model(tmp_path / "m"), device="cpu", dtype=torch.float32)
    second = (random_row(9, 1), [1.0] * 9)
    one, other = (logits_of(decoder, pack([(random_row(5, seed), [1.0] * 5), second])) for seed in (10, 11))
    assert torch.equal(one[5:], other[5:])
    assert not torch.equal(one[:5], other[:5])


def test_a_later_token_does_not_change_an_earlier_logit(tmp_path: Path) -> None:
    decoder = load_model(make_tiny_model(tmp_path / "m"), device="cpu", dtype=torch.float32)
    row = random_row(12, 0)
    one, other = (logits_of(decoder, pack([([*row[:8], *tail], [1.0] * 12)])) for tail in (row[8:], [1, 2, 3, 4]))
    torch.testing.assert_close(one[:8], other[:8], rtol=0, atol=0)
    assert (one[8:] - other[8:]).abs().max() > 1e-3


def test_a20_positions_restart_in_every_row_and_no_row_predicts_the_next() -> None:
    batch = pack([([10, 11, 12], [1.0] * 3), ([20, 21], [1.0] * 2), ([30], [1.0])])
    assert batch.positions.tolist() == [0, 1, 2, 0, 1, 0]
    assert batch.scored == 3
    assert [t for t, w in zip(batch.targets.tolist(), batch.weights.tolist(), strict=True) if w] == [11, 12, 21]


def test_a_batch_that_would_predict_across_rows_is_refused() -> None:
    batch = pack([([1, 2], [1.0, 1.0]), ([3], [1.0])])
    with pytest.raises(ValueError, match="last position of every row"):
        PackedBatch(batch.tokens, batch.positions, batch.targets, torch.ones(3), batch.lengths)
