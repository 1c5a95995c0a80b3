"""Adapters with whole matrices and added tokens, exchanged with PEFT; facts for servers of adapters."""

from __future__ import annotations

import json
import re
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from finery.types.methods import EmbeddingName, LoraAdapter, SftHyperparameters
from finery_gpu_workers.batch import pack
from finery_gpu_workers.errors import WorkerError
from finery_gpu_workers.learner import Learner
from finery_gpu_workers.models.interface import Model
from finery_gpu_workers.models.load import load_model
from finery_gpu_workers.models.lora import Lora, attach
from finery_gpu_workers.models.peft_layout import export_peft, load_peft, read_stored, servable
from finery_testing.tiny import make_tiny_model

torch.set_num_threads(1)

TOKENS = torch.randint(0, 261, (40,), generator=torch.Generator().manual_seed(0)).tolist()
SAVED = [("embed_tokens",), ("lm_head",), ("embed_tokens", "lm_head")]


@torch.no_grad()
def logits_of(model: Model, tokens: list[int] = TOKENS) -> Tensor:
    batch = pack([(tokens, [1.0] * len(tokens))])
    return model.logits(model.forward(batch.tokens, batch.positions, batch.lengths))


@torch.no_grad()
def peer_logits(peer: torch.nn.Module, tokens: list[int] = TOKENS) -> Tensor:
    logits: Tensor = peer(torch.tensor([tokens])).logits[0]
    return logits


def base_of(folder: Path) -> torch.nn.Module:
    base: torch.nn.Module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return base


def trained(model: Model, saved: tuple[EmbeddingName, ...], rows: int = 261) -> Lora:
    """Three updates on random rows; every low-rank B is set apart from zero."""
    lora = attach(model, LoraAdapter(rank=2, alpha=4, modules_to_save=saved), seed=0)
    learner = Learner(model, lora.parameters, lora, SftHyperparameters())
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        batch = pack([(torch.randint(0, rows, (60,), generator=generator).tolist(), [1.0] * 60)])
        learner.forward_backward(batch, batch.scored)
        learner.optim_step(1e-2)
    assert all(bool(view.any()) for view in lora.parameters.views.values())
    return lora


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def folder(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    return make_tiny_model(tmp_path / "model", 3, tie_word_embeddings=request.param)


@pytest.mark.parametrize("saved", SAVED)
def test_whole_matrices_go_to_peft_and_back(folder: Path, tmp_path: Path, saved: tuple[EmbeddingName, ...]) -> None:
    model = load_model(folder, device="cpu", dtype=torch.float32)
    lora = trained(model, saved)
    ours = logits_of(model)
    export_peft(lora, tmp_path / "ours", base_model="tiny")
    peer = peft.PeftModel.from_pretrained(base_of(folder), tmp_path / "ours")
    torch.testing.assert_close(ours, peer_logits(peer), rtol=0, atol=1e-5)
    peer.save_pretrained(tmp_path / "peft")
    files = [load_file(tmp_path / who / "adapter_model.safetensors") for who in ("ours", "peft")]
    assert files[0].keys() == files[1].keys()
    assert all(torch.equal(files[0][key], files[1][key]) for key in files[0])
    for who in ("ours", "peft"):
        adapter = read_stored(tmp_path / who).adapter
        assert adapter == lora.adapter
        again = load_model(folder, device="cpu", dtype=torch.float32)
        load_peft(attach(again, adapter, seed=5), tmp_path / who)
        assert torch.equal(logits_of(again), ours)
        assert again.tied is model.tied


def test_an_adapter_with_other_whole_matrices_is_refused(folder: Path, tmp_path: Path) -> None:
    export_peft(trained(load_model(folder, device="cpu", dtype=torch.float32), ("lm_head",)), tmp_path, base_model="t")
    fresh = attach(load_model(folder, device="cpu", dtype=torch.float32), LoraAdapter(rank=2, alpha=4), seed=0)
    with pytest.raises(WorkerError, match=r"adapter_mismatch.*modules_to_save \[\], found.*'lm_head'"):
        load_peft(fresh, tmp_path)


def test_a_tie_that_the_file_breaks_is_refused(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model")
    lora = trained(load_model(folder, device="cpu", dtype=torch.float32), ("embed_tokens",))
    export_peft(lora, tmp_path / "a", base_model="t")
    path = tmp_path / "a" / "adapter_model.safetensors"
    save_file(load_file(path) | {"base_model.model.lm_head.weight": torch.zeros(261, 32)}, path)
    with pytest.raises(WorkerError, match=r"adapter_mismatch.*lm_head"):
        load_peft(lora, tmp_path / "a")


def test_d05_an_adapter_of_263_tokens_needs_a_base_of_263(folder: Path, tmp_path: Path) -> None:
    """The recipe: resize the base to the tokenizer that lies next to the adapter, then load."""
    tied = json.loads((folder / "config.json").read_text())["tie_word_embeddings"]
    model = load_model(folder, device="cpu", dtype=torch.float32, new_tokens=2)
    lora = trained(model, ("embed_tokens",) if tied else ("embed_tokens", "lm_head"), rows=263)
    export_peft(lora, tmp_path / "a", base_model="tiny")
    tokens = [*TOKENS, 261, 262, 5]
    with pytest.raises(RuntimeError, match=r"263, 32.*261, 32"):
        peft.PeftModel.from_pretrained(base_of(folder), tmp_path / "a")
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    base.resize_token_embeddings(263, mean_resizing=False)
    peer = peft.PeftModel.from_pretrained(base, tmp_path / "a")
    torch.testing.assert_close(logits_of(model, tokens), peer_logits(peer, tokens), rtol=0, atol=1e-5)
    rows = load_file(tmp_path / "a" / "adapter_model.safetensors")["base_model.model.model.embed_tokens.weight"]
    before = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    assert (rows[261:] - before.mean(dim=0)).abs().max() > 1e-3, "the new rows were trained"
    again = load_model(folder, device="cpu", dtype=torch.float32, new_tokens=2)
    load_peft(attach(again, lora.adapter, seed=9), tmp_path / "a")
    assert torch.equal(logits_of(again, tokens), logits_of(model, tokens))
    small = load_model(folder, device="cpu", dtype=torch.float32)
    with pytest.raises(WorkerError, match=r"adapter_mismatch.*expected shape \(261, 32\), found \(263, 32\)"):
        load_peft(attach(small, lora.adapter, seed=9), tmp_path / "a")


@pytest.mark.parametrize(
    ("adapter", "facts"),
    [
        (LoraAdapter(rank=8), {"servable_as_adapter": True, "max_rank_required": 8}),
        (
            LoraAdapter(rank=8, modules_to_save=("lm_head",)),
            {"servable_as_adapter": False, "max_rank_required": 8, "reason": "modules_to_save=[lm_head]"},
        ),
        (LoraAdapter(rank=128), {"servable_as_adapter": True, "max_rank_required": 128}),
    ],
    ids=["a", "b", "c"],
)
def test_d09_the_manifest_says_whether_a_server_can_load_the_adapter(
    tmp_path: Path, adapter: LoraAdapter, facts: dict[str, object]
) -> None:
    assert servable(adapter) == facts
    model = load_model(make_tiny_model(tmp_path / "m"), device="cpu", dtype=torch.float32)
    export_peft(attach(model, adapter, seed=0), tmp_path / "a", base_model="tiny")
    keys = load_file(tmp_path / "a" / "adapter_model.safetensors").keys()
    modules = {name for name, one in base_of(tmp_path / "m").named_modules() if isinstance(one, torch.nn.Linear)}
    fits = [re.fullmatch(r"base_model\.model\.(.+)\.lora_[AB]\.weight", key) for key in keys]
    paths = {match[1] for match in fits if match}
    assert paths == modules - {"lm_head"}
    assert [match is not None for match in fits].count(False) == len(adapter.modules_to_save)


def test_d09_an_adapter_on_merged_weights_is_not_for_the_catalogues_model() -> None:
    facts = servable(LoraAdapter(rank=8), own_base=True)
    assert facts["servable_as_adapter"] is False
    assert "merged" in str(facts["reason"])
