"""The base of a job that builds on checkpoints: models, merged adapters, a vocabulary that grows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from finery.types.methods import EmbeddingName, LoraAdapter
from finery_gpu_workers.batch import pack
from finery_gpu_workers.errors import WorkerError
from finery_gpu_workers.models.export import export_full
from finery_gpu_workers.models.interface import Model
from finery_gpu_workers.models.load import load_model
from finery_gpu_workers.models.lora import attach
from finery_gpu_workers.models.parts import Part
from finery_gpu_workers.models.peft_layout import export_peft
from finery_testing.tiny import make_tiny_model

torch.set_num_threads(1)

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
TOKENS = torch.randint(0, 261, (40,), generator=torch.Generator().manual_seed(0)).tolist()


def load(folder: Path, *parts: Part, new_tokens: int = 0, dtype: torch.dtype = torch.float32) -> Model:
    return load_model(folder, parts, device="cpu", dtype=dtype, new_tokens=new_tokens)


@torch.no_grad()
def logits_of(model: Model) -> Tensor:
    batch = pack([(TOKENS, [1.0] * len(TOKENS))])
    return model.logits(model.forward(batch.tokens, batch.positions, batch.lengths))


@torch.no_grad()
def peer_logits(peer: torch.nn.Module) -> Tensor:
    logits: Tensor = peer(torch.tensor([TOKENS])).logits[0]
    return logits


def adapter_in(
    folder: Path, model: Model, seed: int, saved: tuple[EmbeddingName, ...] = (), targets: Any = "all-linear"
) -> Path:
    """An adapter for `model`, as if trained."""
    lora = attach(model, LoraAdapter(rank=2, alpha=3, targets=targets, modules_to_save=saved), seed=seed)
    generator = torch.Generator().manual_seed(seed)
    for view in lora.parameters.views.values():
        view.detach().add_(0.2 * torch.randn(view.shape, generator=generator))
    export_peft(lora, folder, base_model="tiny")
    return folder


def merged_by_peft(base: torch.nn.Module, *adapters: Path) -> torch.nn.Module:
    for adapter in adapters:
        base = peft.PeftModel.from_pretrained(base, adapter).merge_and_unload()
    return base


def base_of(folder: Path) -> torch.nn.Module:
    base: torch.nn.Module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return base


@pytest.mark.parametrize("saved", [(), ("lm_head",), ("embed_tokens", "lm_head"), ("embed_tokens",)])
@pytest.mark.parametrize("tied", [True, False])
def test_adapters_merge_in_order_as_pefts_do(tmp_path: Path, tied: bool, saved: tuple[EmbeddingName, ...]) -> None:
    source = make_tiny_model(tmp_path / "m", 3, tie_word_embeddings=tied)
    one = adapter_in(tmp_path / "one", load(source), 1, saved)
    two = adapter_in(tmp_path / "two", load(source, Part("merge", one)), 2, (), ("q_proj", "down_proj"))
    model = load(source, Part("merge", one), Part("merge", two))
    assert model.tied is (tied and "lm_head" not in saved)
    peer = merged_by_peft(base_of(source), one, two)
    torch.testing.assert_close(logits_of(model), peer_logits(peer), rtol=0, atol=2e-5)
    assert (logits_of(model) - logits_of(load(source))).abs().max() > 0.1


def test_an_embedding_that_peft_trained_without_its_tie_unties_the_model(tmp_path: Path) -> None:
    source = make_tiny_model(tmp_path / "m", 3)
    peer = peft.get_peft_model(
        base_of(source), peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["embed_tokens"])
    )
    with torch.no_grad():
        peer.get_input_embeddings().weight.mul_(1.5)
    peer.save_pretrained(tmp_path / "a")
    model = load(source, Part("merge", tmp_path / "a"))
    assert not model.tied
    torch.testing.assert_close(logits_of(model), peer_logits(peer), rtol=0, atol=1e-5)


def test_a_merge_rounds_once_per_part(tmp_path: Path) -> None:
    """In bf16: round(round(W + s·BA) + s·B'A'), each sum in float32."""
    source = make_tiny_model(tmp_path / "m", 3, dtype="bfloat16")
    adapters = [adapter_in(tmp_path / str(n), load(source, dtype=torch.bfloat16), n) for n in (1, 2)]
    model = load(source, *(Part("merge", folder) for folder in adapters), dtype=torch.bfloat16)
    name = "model.layers.1.mlp.up_proj"
    expected = load_file(source / "model.safetensors")[f"{name}.weight"]
    for folder in adapters:
        pair = load_file(folder / "adapter_model.safetensors")
        down, up = (pair[f"base_model.model.{name}.lora_{which}.weight"] for which in "AB")
        expected = (expected.to(torch.float32) + 1.5 * (up @ down)).to(torch.bfloat16)  # alpha / rank
    assert torch.equal(dict(model.named_weights())[f"{name}.weight"], expected)


def test_a_whole_model_replaces_everything_before_it_with_its_own_config(tmp_path: Path) -> None:
    source = make_tiny_model(tmp_path / "m", 3)
    before = adapter_in(tmp_path / "before", load(source), 1)
    whole = make_tiny_model(tmp_path / "whole", 4, vocab_size=263, tie_word_embeddings=False)
    after = adapter_in(tmp_path / "after", load(whole), 2)
    model = load(source, Part("merge", before), Part("full", whole), Part("merge", after))
    assert (model.vocab, model.tied) == (263, False)
    torch.testing.assert_close(logits_of(model), peer_logits(merged_by_peft(base_of(whole), after)), rtol=0, atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [True, False])
def test_new_rows_are_the_mean_of_all(tmp_path: Path, tied: bool, dtype: torch.dtype) -> None:
    name = str(dtype).removeprefix("torch.")
    source = make_tiny_model(tmp_path / "m", 3, tie_word_embeddings=tied, dtype=name)
    model = load(source, new_tokens=2, dtype=dtype)
    assert (model.vocab, model.tied) == (263, tied)
    stored, weights = load_file(source / "model.safetensors"), dict(model.named_weights())
    for matrix in {EMBEDDING, HEAD} & stored.keys():
        mean = stored[matrix].to(torch.float64).mean(dim=0)
        assert torch.equal(weights[matrix][:261], stored[matrix])
        for row in weights[matrix][261:]:
            torch.testing.assert_close(row.double(), mean, rtol=2**-8 if dtype == torch.bfloat16 else 0, atol=1e-7)
    # A model that grew is written, read back, and grows again.
    assert export_full(model, source, tmp_path / "out") == sum(t.numel() for t in weights.values())
    assert json.loads((tmp_path / "out" / "config.json").read_text())["vocab_size"] == 263
    again = load(source, Part("full", tmp_path / "out"), new_tokens=1, dtype=dtype)
    assert again.vocab == 264
    assert torch.equal(dict(again.named_weights())[EMBEDDING][:263], weights[EMBEDDING])


def test_a_merged_vocabulary_comes_with_the_adapter(tmp_path: Path) -> None:
    source = make_tiny_model(tmp_path / "m", 3)
    grown = adapter_in(tmp_path / "a", load(source, new_tokens=2), 1, ("embed_tokens",))
    model = load(source, Part("merge", grown))
    assert (model.vocab, model.tied) == (263, True)
    assert load(source, Part("merge", grown), new_tokens=3).vocab == 266


def edit(folder: Path, change: dict[str, Tensor | None]) -> None:
    path = folder / "adapter_model.safetensors"
    save_file({k: v for k, v in (load_file(path) | change).items() if v is not None}, path)


KEY = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({KEY.format("A"): torch.zeros(2, 31)}, r"layers\.0\.self_attn\.q_proj"),
        ({KEY.format("B"): None}, r"q_proj"),
        ({KEY.format("A"): None}, r"q_proj"),
        ({"base_model.model.model.layers.9.mlp.up_proj.lora_A.weight": torch.zeros(2, 32)}, r"layers\.9\.mlp\.up_proj"),
        ({"base_model.model.lm_head.weight": torch.zeros(200, 32)}, r"lm_head.*200"),
        ({"model.norm.weight": torch.zeros(32)}, r"model\.norm"),
    ],
)
def test_d10_an_adapter_of_another_model_is_not_merged(
    tmp_path: Path, change: dict[str, Tensor | None], named: str
) -> None:
    source = make_tiny_model(tmp_path / "m", 3)
    edit(adapter_in(tmp_path / "a", load(source), 1), change)
    with pytest.raises(WorkerError, match=f"adapter_mismatch.*{named}"):
        load(source, Part("merge", tmp_path / "a"))
