"""Whole jobs on architectures that transformers computes for us: slower, but all that is promised holds."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from finery.types.methods import FullWeights, LoraAdapter
from finery_testing.tiny import BOS, EOS, IM_END, PAD

from .cards import Spy, logits_of, run_card
from .conftest import MakeJob, chat_rows, ended, evaluations, last_folder, last_manifest, stands_on, trained

IDS = list(b"What is 2 plus 2?")
GEMMA: dict[str, Any] = {"model_type": "gemma2", "head_dim": 8, "num_key_value_heads": 2, "sliding_window": 16}
GPT2: dict[str, Any] = {"model_type": "gpt2", "n_positions": 256}


def make(folder: Path, tokenizer: Path, **config: Any) -> Path:
    """A random model of another architecture, with F-TOK and F-CHAT."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 261, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    ids = {"num_attention_heads": 4, "bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD}
    made = AutoModelForCausalLM.from_config(AutoConfig.for_model(**sizes | ids | config), dtype=torch.float32)
    with torch.no_grad():
        for weight in made.parameters():
            if weight.ndim > 1:
                weight.copy_(torch.randn_like(weight) * weight.shape[-1] ** -0.5)
    made.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(tokenizer / name, folder / name)
    return folder


def test_an_adapter_on_another_architecture(
    make_job: MakeJob, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = make(tmp_path / "gemma", tiny_folder, **GEMMA)
    spy = Spy(monkeypatch, IDS)
    job = {"model": base, "validation": chat_rows(3), "spec": {"export_merged": True}, "epochs": 3}
    control = trained(make_job(**job))
    assert ended(control) == "completed"
    assert evaluations(control)[control.step] < 0.9 * evaluations(control)[0]
    folder, content = last_folder(control), last_manifest(control)
    assert content["compute"]["engine"] == "transformers"
    assert "gemma2" in content["engine_reason"]
    assert (content["adapted_modules"], content["servable_as_adapter"]) == (2 * 7, True)
    assert torch.allclose(logits_of(run_card(folder, base=base)["model"], IDS), spy.logits, atol=1e-4)
    assert torch.allclose(logits_of(run_card(folder, 1)["model"], IDS), spy.logits, atol=1e-4)
    settings = json.loads((folder / "generation_config.json").read_text())
    assert settings["eos_token_id"] == [EOS, IM_END]
    after = trained(make_job(model=base, validation=chat_rows(3), onto=stands_on(control, "merge"), max_steps=1))
    assert evaluations(after)[0] == pytest.approx(evaluations(control)[control.step], rel=1e-5)


@pytest.mark.parametrize("config", [GEMMA, GPT2], ids=["gemma2", "gpt2"])
def test_all_weights_of_another_architecture(
    make_job: MakeJob, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: dict[str, Any]
) -> None:
    base = make(tmp_path / "other", tiny_folder, **config)
    spy = Spy(monkeypatch, IDS)
    full = FullWeights(type="full")
    control = trained(make_job(model=base, adapter=full, validation=chat_rows(3), epochs=3, learning_rate=3e-3))
    assert ended(control) == "completed"
    assert evaluations(control)[control.step] < 0.9 * evaluations(control)[0]
    names = run_card(last_folder(control))
    assert torch.allclose(logits_of(names["model"], IDS), spy.logits, atol=1e-4)
    parameters = sum(parameter.numel() for parameter in names["model"].parameters())
    content = last_manifest(control)
    assert content["parameters"] == content["trained_parameters"] == parameters
    after = trained(make_job(adapter=full, validation=chat_rows(3), onto=stands_on(control, "full"), max_steps=1))
    assert evaluations(after)[0] == evaluations(control)[control.step]


def test_an_adapter_that_the_architecture_has_no_place_for_is_the_customers_to_mend(
    make_job: MakeJob, tiny_folder: Path, tmp_path: Path
) -> None:
    base = make(tmp_path / "gpt2", tiny_folder, **GPT2)
    control = trained(make_job(model=base, adapter=LoraAdapter(targets=("q_proj",)), max_steps=1))
    assert ended(control) == "invalid_model"
    assert control.finished is not None
    assert control.finished.error is not None
    assert control.finished.error.code == "unknown_target"
    assert not control.steps


def test_rows_of_added_tokens_start_as_the_mean_of_all_whatever_the_matrices_are_called(
    make_job: MakeJob, tiny_folder: Path, tmp_path: Path
) -> None:
    """In a padded vocabulary the rows are there, with other numbers."""
    base = make(tmp_path / "neox", tiny_folder, model_type="gpt_neox", vocab_size=272, max_position_embeddings=256)
    spec = {"added_tokens": ("<tool>",)}
    control = trained(
        make_job(model=base, adapter=FullWeights(type="full"), spec=spec, max_steps=1, learning_rate=1e-9)
    )
    assert ended(control) == "completed"
    before, after = (load_file(each / "model.safetensors") for each in (base, last_folder(control)))
    for name in ("gpt_neox.embed_in.weight", "embed_out.weight"):
        assert torch.allclose(after[name][261], before[name].mean(dim=0), atol=1e-6)
        assert torch.allclose(after[name][262:], before[name][262:], atol=1e-6)
