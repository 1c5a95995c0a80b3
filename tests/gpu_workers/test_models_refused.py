"""What the fallback refuses, and why: by config, by weights, by trying."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from finery.types.methods import LoraAdapter
from finery_gpu_workers.errors import WorkerError
from finery_gpu_workers.models.catalog import check_config, read_shape
from finery_gpu_workers.models.interface import Model
from finery_gpu_workers.models.load import load_model
from finery_gpu_workers.models.lora import attach

from .sizes import SIZES

torch.set_num_threads(1)


def make(folder: Path, model_type: str, **config: Any) -> Path:
    """A random model, written by transformers."""
    torch.manual_seed(0)
    given = SIZES | config | {"model_type": model_type}
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**given), dtype=torch.float32).save_pretrained(folder)
    return folder


def load(folder: Path) -> Model:
    return load_model(folder, device="cpu", dtype=torch.float32)


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_gpt2_has_no_linear_layer_for_an_adapter(tmp_path: Path) -> None:
    model = load(make(tmp_path / "m", "gpt2", n_embd=48, n_layer=2, n_head=4, n_positions=96))
    with pytest.raises(WorkerError, match=r"unknown_target.*no linear layer"):
        attach(model, LoraAdapter(), seed=0)


@pytest.mark.parametrize(
    ("kind", "targets", "named"),
    [
        ("phi3", ("q_proj", "down_proj"), r"has \(down_proj, gate_up_proj, o_proj, qkv_proj\), found `q_proj`"),
        ("llama", ("q_proj",), ""),
    ],
)
def test_a_target_that_the_model_lacks_is_named(tmp_path: Path, kind: str, targets: Any, named: str) -> None:
    model = load(make(tmp_path / "m", kind, tie_word_embeddings=False))
    adapter = LoraAdapter(targets=targets)
    if named:
        with pytest.raises(WorkerError, match=f"unknown_target.*{named}"):
            attach(model, adapter, seed=0)
    else:
        assert len(attach(model, adapter, seed=0).parameters.views) == 4
    if kind == "phi3":
        lora = attach(load(tmp_path / "m"), LoraAdapter(modules_to_save=("embed_tokens",)), seed=0)
        assert "model.embed_tokens.weight" in lora.parameters.views


def test_whole_matrices_of_other_names_are_refused(tmp_path: Path) -> None:
    model = load(make(tmp_path / "m", "gpt_neox", tie_word_embeddings=False))
    with pytest.raises(WorkerError, match=r"unknown_target.*embed_tokens.*gpt_neox\.embed_in"):
        attach(model, LoraAdapter(modules_to_save=("embed_tokens",)), seed=0)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "mixtral": ({"num_local_experts": 2, "num_experts_per_tok": 1}, "more than two dimensions"),
    "bert": ({}, "no causal model"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_would_be_trained_wrongly_is_refused_with_the_reason(tmp_path: Path, kind: str) -> None:
    config, named = REFUSED[kind]
    folder = make(tmp_path / "m", kind, **config)
    with pytest.raises(WorkerError, match=f"unsupported_model.*{named}"):
        load(folder)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"model_type": "t5"}, "encoder"),
        ({"model_type": "clip"}, "composite|no causal"),
        ({"model_type": "no-such-thing"}, "no-such-thing"),
        ({"quantization_config": {"bits": 4}}, "quantised"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "dynamic"),
        ({"hidden_act": "no-such-function"}, "no-such-function"),
    ],
)
def test_a_config_that_cannot_work_is_refused_before_weights_are_read(
    tmp_path: Path, config: dict[str, Any], named: str
) -> None:
    folder = make(tmp_path / "m", "olmo2")
    edit_config(folder, **config)
    with pytest.raises(WorkerError, match=f"unsupported_model.*({named})"):
        load(folder)


def test_the_shape_of_a_model_whose_config_leaves_the_tie_to_a_default(tmp_path: Path) -> None:
    for kind, tied in (("gemma2", True), ("olmo2", False), ("qwen2", False)):
        path = make(tmp_path / kind, kind) / "config.json"
        config = {k: v for k, v in json.loads(path.read_text()).items() if k != "tie_word_embeddings"}
        path.write_text(json.dumps(config))
        assert read_shape(tmp_path / kind) == (120, tied)
        assert check_config(tmp_path / kind) == ("finery" if kind == "qwen2" else "transformers")


def test_a_missing_tensor_is_not_made_up(tmp_path: Path) -> None:
    folder = make(tmp_path / "m", "olmo2")
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    save_file({k: v for k, v in tensors.items() if k != name}, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(WorkerError, match=f"invalid_model.*{name}"):
        load(folder)


@pytest.mark.parametrize("kind", ["gpt2", "opt"])
def test_a_row_longer_than_there_are_positions_is_refused(tmp_path: Path, kind: str) -> None:
    sizes = {"gpt2": {"n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 96}, "opt": {"word_embed_proj_dim": 48}}
    model = load(make(tmp_path / "m", kind, **sizes[kind]))
    model.forward(torch.zeros(96, dtype=torch.int64), torch.arange(96), (96,))
    with pytest.raises(WorkerError, match=r"row_too_long_for_model.*at most 96 .*found 97"):
        model.forward(torch.zeros(97, dtype=torch.int64), torch.arange(97), (97,))


def test_h13_a_foreign_model_with_its_own_code_is_refused(tmp_path: Path) -> None:
    folder = make(tmp_path / "m", "olmo2")
    canary = tmp_path / "canary"
    (folder / "evil.py").write_text(f"open({str(canary)!r}, 'w')")
    edit_config(folder, auto_map={"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"})
    with pytest.raises(WorkerError, match="model_requires_remote_code"):
        load(folder)
    assert not canary.exists()


def test_h01_a_foreign_model_with_a_pickle_or_an_adapter_in_its_folder_is_refused(tmp_path: Path) -> None:
    folder = make(tmp_path / "m", "olmo2")
    other = make(tmp_path / "other", "olmo2")
    adapter = folder / "adapter_config.json"
    adapter.write_text(json.dumps({"peft_type": "LORA", "base_model_name_or_path": str(other)}))
    with pytest.raises(WorkerError, match=r"invalid_model.*adapter_config\.json"):
        load(folder)
    adapter.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04N.")
    with pytest.raises(WorkerError, match=r"unsafe_checkpoint_file.*pytorch_model\.bin"):
        load(folder)


def test_positions_that_go_on_over_a_row_are_not_taken_for_the_models_own(tmp_path: Path) -> None:
    model = load(make(tmp_path / "m", "olmo2"))
    with pytest.raises(ValueError, match="count from 0"):
        model.forward(torch.zeros(8, dtype=torch.int64), torch.arange(8), (4, 4))


def test_a_tie_that_the_weights_break_is_refused(tmp_path: Path) -> None:
    folder = make(tmp_path / "m", "gemma2", head_dim=12)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] + 1}, path, metadata={"format": "pt"})
    with pytest.raises(WorkerError, match=r"invalid_model.*tie_word_embeddings"):
        load(folder)


def test_what_transformers_says_names_no_path_of_the_operators(tmp_path: Path) -> None:
    """The sentence is the customer's to read."""
    folder = make(tmp_path / "secret", "gpt2", n_embd=48, n_layer=2, n_head=4, n_positions=96)
    config = json.loads((folder / "config.json").read_text())
    del config["model_type"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(WorkerError, match="Unrecognized model in its folder") as error:
        load(folder)
    assert "secret" not in error.value.message
