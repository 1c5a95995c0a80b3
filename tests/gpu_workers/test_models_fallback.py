"""Architectures that transformers computes for us: equal to it, to PEFT's adapters on it, and refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from finery.types.methods import EmbeddingName, FullWeights, LoraAdapter, SftHyperparameters
from finery_gpu_workers.batch import PackedBatch, pack
from finery_gpu_workers.learner import Learner
from finery_gpu_workers.models.export import export_full, export_merged
from finery_gpu_workers.models.interface import Model
from finery_gpu_workers.models.load import load_model
from finery_gpu_workers.models.lora import Lora, attach
from finery_gpu_workers.models.parts import Part
from finery_gpu_workers.models.peft_layout import export_peft, load_peft, read_stored

from .sizes import SIZES

torch.set_num_threads(1)

ROWS = [torch.randint(0, 120, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (7, 23, 5, 23, 40)]
PARTLY = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}
OTHERS: dict[str, dict[str, Any]] = {
    "gemma2": {"head_dim": 12, "sliding_window": 8, "final_logit_softcapping": 2.0},
    "gemma3_text": {"head_dim": 12, "sliding_window": 8},
    "phi3": {"tie_word_embeddings": False},
    "gpt_neox": {"tie_word_embeddings": False},
    "olmo2": {"tie_word_embeddings": False},
    "granite": {"logits_scaling": 3.0, "embedding_multiplier": 2.0, "residual_multiplier": 0.5},
    "stablelm": {"tie_word_embeddings": True, "rope_parameters": PARTLY},
    "smollm3": {"no_rope_layers": [1, 0]},
    "cohere": {"logit_scale": 0.3},
    "mistral": {"sliding_window": 8},
    "opt": {"ffn_dim": 80, "word_embed_proj_dim": 48},
    "gpt2": {"n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 96},
}


def make(folder: Path, model_type: str, **config: Any) -> Path:
    """A random model, written by transformers; biases and norms are drawn, too."""
    torch.manual_seed(0)
    given = SIZES | config | {"model_type": model_type}
    made = AutoModelForCausalLM.from_config(AutoConfig.for_model(**given), dtype=torch.float32)
    with torch.no_grad():
        for parameter in made.parameters():
            noise = torch.randn_like(parameter) * (parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 0.2)
            parameter.copy_(noise if parameter.ndim > 1 else parameter + noise)
    made.save_pretrained(folder)
    return folder


def load(folder: Path, *parts: Part, new_tokens: int = 0) -> Model:
    return load_model(folder, parts, device="cpu", dtype=torch.float32, new_tokens=new_tokens)


def peer_of(folder: Path) -> Any:
    """With its own attention, so that ours is held against another way to compute it."""
    peer, report = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not any(report.values()), report
    return peer.eval()


def batch() -> PackedBatch:
    return pack([(row, [1.0] * len(row)) for row in ROWS])


@torch.no_grad()
def logits_of(model: Model) -> Tensor:
    packed = batch()
    return model.logits(model.forward(packed.tokens, packed.positions, packed.lengths))


def peer_logits(peer: nn.Module) -> list[Tensor]:
    return [peer(torch.tensor([row]), use_cache=False).logits[0] for row in ROWS]


def peer_backward(peer: nn.Module) -> None:
    losses = [
        nn.functional.cross_entropy(one[:-1], torch.tensor(row[1:]), reduction="sum")
        for one, row in zip(peer_logits(peer), ROWS, strict=True)
    ]
    (sum(losses, torch.zeros(())) / sum(len(row) - 1 for row in ROWS)).backward()


def assert_close(found: Tensor, expected: Tensor, what: str) -> None:
    assert float(expected.norm()) > 0, what
    difference = float((found - expected).norm() / expected.norm())
    assert difference <= 1e-5, f"{what}: {difference:.1e}"


def shaken(model: Model, adapter: LoraAdapter) -> Lora:
    lora = attach(model, adapter, seed=0)
    for view in lora.parameters.views.values():
        view.detach().add_(0.1 * torch.randn(view.shape, generator=torch.Generator().manual_seed(2)))
    lora.refresh()
    return lora


@pytest.mark.parametrize("kind", OTHERS)
def test_logits_and_all_gradients_equal_those_of_transformers(tmp_path: Path, kind: str) -> None:
    folder = make(tmp_path / "m", kind, **OTHERS[kind])
    model, peer = load(folder), peer_of(folder)
    assert model.engine == "transformers"
    assert ("sliding_window" if kind == "mistral" else "model_type") in model.engine_reason
    with torch.no_grad():
        expected = torch.cat(peer_logits(peer))
    assert expected.std() > 0.1, "logits that are all alike would prove nothing"
    assert_close(logits_of(model), expected, "logits")
    learner = Learner.create(model, FullWeights(type="full"), SftHyperparameters(), seed=0)
    learner.forward_backward(batch(), batch().scored)
    peer_backward(peer)
    found = learner._parameters.named(learner._parameters.gradients)
    wanted = {name: p.grad for name, p in peer.named_parameters() if p.grad is not None}
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        if float(gradient.norm()) > 1e-6:  # a bias of keys changes nothing: the softmax takes it out again
            assert_close(found[name], gradient, name)


def test_a_token_that_the_model_pads_with_is_trained_like_any_other(tmp_path: Path) -> None:
    """transformers leaves its row of the embedding without a gradient; our own decoder does not."""
    padding = int(batch().tokens[0])
    folder = make(tmp_path / "m", "gemma2", **OTHERS["gemma2"] | {"pad_token_id": padding})
    peer = peer_of(folder)
    assert peer.get_input_embeddings().padding_idx == padding
    peer.get_input_embeddings().padding_idx = None
    peer_backward(peer)
    learner = Learner.create(load(folder), FullWeights(type="full"), SftHyperparameters(), seed=0)
    learner.forward_backward(batch(), batch().scored)
    name = "model.embed_tokens.weight"
    found = learner._parameters.named(learner._parameters.gradients)[name]
    assert_close(found, peer.get_input_embeddings().weight.grad, name)


@pytest.mark.parametrize("kind", ["gemma2", "phi3", "gpt_neox", "stablelm"])
def test_an_adapter_equals_pefts_on_the_same_model(tmp_path: Path, kind: str) -> None:
    folder = make(tmp_path / "m", kind, **OTHERS[kind])
    model = load(folder)
    lora = shaken(model, LoraAdapter(rank=3, alpha=6))
    export_peft(lora, tmp_path / "a", base_model="tiny")
    peer = peft.PeftModel.from_pretrained(peer_of(folder), tmp_path / "a", is_trainable=True)
    with torch.no_grad():
        assert_close(logits_of(model), torch.cat(peer_logits(peer)), "logits")
    learner = Learner(model, lora.parameters, lora, SftHyperparameters())
    learner.forward_backward(batch(), batch().scored)
    peer_backward(peer)
    grads = {name: p.grad for name, p in peer.named_parameters() if p.grad is not None}
    found = lora.parameters.named(lora.parameters.gradients)
    layers = [name for name, one in peer_of(folder).named_modules() if isinstance(one, nn.Linear)]
    assert len(found) == len(grads) == 2 * (len(layers) - 1), "every linear layer but the head"
    for name, gradient in found.items():
        assert_close(gradient, grads[f"base_model.model.{name}.default.weight"], name)
    again = load(folder)
    load_peft(attach(again, read_stored(tmp_path / "a").adapter, seed=5), tmp_path / "a")
    assert torch.equal(logits_of(again), logits_of(model))


@pytest.mark.parametrize("kind", ["gemma2", "phi3", "gpt_neox"])
def test_d07_d08_a_merge_is_written_and_read_by_transformers(tmp_path: Path, kind: str) -> None:
    folder = make(tmp_path / "m", kind, **OTHERS[kind])
    model = load(folder)
    lora = shaken(model, LoraAdapter(rank=2, alpha=3))
    export_peft(lora, tmp_path / "a", base_model="tiny")
    count = export_merged(model, lora, folder, tmp_path / "out")
    peer = peer_of(tmp_path / "out")
    assert count == sum(p.numel() for p in peer.parameters())
    with torch.no_grad():
        found = torch.cat(peer_logits(peer))
    assert_close(found, logits_of(model), "merged")
    assert_close(found, logits_of(load(folder, Part("merge", tmp_path / "a"))), "merged part")
    assert_close(found, logits_of(load(folder, Part("full", tmp_path / "out"))), "full part")


@pytest.mark.parametrize("kind", ["gemma2", "gpt_neox"])
def test_a_vocabulary_grows(tmp_path: Path, kind: str) -> None:
    folder = make(tmp_path / "m", kind, **OTHERS[kind])
    base, model = load(folder), load(folder, new_tokens=2)
    assert (model.vocab, model.tied) == (122, base.tied)
    assert_close(logits_of(model)[:, :120], logits_of(base), "old tokens")
    matrix = next(weight for _, weight in model.named_weights() if len(weight) == 122)
    torch.testing.assert_close(matrix[121], matrix[:120].mean(dim=0))
    export_full(model, folder, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["vocab_size"] == 122
    with torch.no_grad():
        assert_close(torch.cat(peer_logits(peer_of(tmp_path / "out"))), logits_of(model), "reloaded")


@pytest.mark.parametrize("saved", [("embed_tokens",), ("lm_head",)])
def test_whole_matrices_next_to_an_adapter_equal_pefts(tmp_path: Path, saved: tuple[EmbeddingName, ...]) -> None:
    folder = make(tmp_path / "m", "gemma2", **OTHERS["gemma2"])
    model = load(folder)
    lora = shaken(model, LoraAdapter(rank=2, alpha=3, modules_to_save=saved))
    assert model.tied is ("lm_head" not in saved)
    export_peft(lora, tmp_path / "a", base_model="tiny")
    peer = peft.PeftModel.from_pretrained(peer_of(folder), tmp_path / "a")
    with torch.no_grad():
        assert_close(logits_of(model), torch.cat(peer_logits(peer)), "logits")
    export_merged(model, lora, folder, tmp_path / "out")
    with torch.no_grad():
        assert_close(torch.cat(peer_logits(peer_of(tmp_path / "out"))), logits_of(model), "merged")
