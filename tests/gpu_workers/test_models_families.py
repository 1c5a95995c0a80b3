"""Every family that our decoder computes, against transformers: logits and gradients of packed rows, float32."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from finery.types.methods import FullWeights, LoraAdapter, SftHyperparameters
from finery_gpu_workers.batch import PackedBatch, pack
from finery_gpu_workers.errors import WorkerError
from finery_gpu_workers.learner import Learner
from finery_gpu_workers.models.decoder import Decoder
from finery_gpu_workers.models.export import export_full
from finery_gpu_workers.models.load import load_model
from finery_gpu_workers.models.lora import attach
from finery_gpu_workers.models.peft_layout import export_peft

from .sizes import SIZES as COMMON

torch.set_num_threads(1)

ROWS = [
    torch.randint(0, 120, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (7, 23, 23, 2, 90, 61)
]
SIZES = COMMON | {"num_hidden_layers": 3}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama with biases": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "mistral": {"model_type": "mistral", "sliding_window": None},
    "mistral, wide window": {"model_type": "mistral", "sliding_window": 96},
    "qwen2": {"model_type": "qwen2", "sliding_window": 8, "use_sliding_window": False},
    "qwen3": {"model_type": "qwen3", "head_dim": 20},
    "qwen3 with biases": {"model_type": "qwen3", "head_dim": 16, "attention_bias": True},
}
SCALED = {"rope_theta": 500.0, "factor": 3.0}
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
ROPES: dict[str, dict[str, Any]] = {
    "linear": SCALED | {"rope_type": "linear"},
    "dynamic": SCALED | {"rope_type": "dynamic"},
    "llama3": SCALED | {"rope_type": "llama3"} | LLAMA3,
    "yarn": SCALED | {"rope_type": "yarn", "original_max_position_embeddings": 32},
    "yarn, all keys": SCALED
    | {"rope_type": "yarn", "original_max_position_embeddings": 24, "beta_fast": 8, "beta_slow": 2}
    | {"truncate": False, "attention_factor": 1.3},
    "yarn of DeepSeek": SCALED
    | {"rope_type": "yarn", "original_max_position_embeddings": 32, "mscale": 0.7, "mscale_all_dim": 0.4},
}


def make(folder: Path, **config: Any) -> Path:
    """A random model, written by transformers; biases and norms are drawn, too."""
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(AutoConfig.for_model(**(SIZES | config)), dtype=torch.float32)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(std=parameter.shape[-1] ** -0.5) if parameter.ndim > 1 else parameter.add_(
                torch.randn_like(parameter) * 0.2
            )
    made.save_pretrained(folder)
    return folder


def batch() -> PackedBatch:
    return pack([(row, [1.0] * len(row)) for row in ROWS])


def peer_backward(peer: nn.Module) -> list[Tensor]:
    """The rows' logits, each row alone; leaves the gradient of the mean loss over all scored tokens."""
    logits = [peer(torch.tensor([row]), use_cache=False).logits[0] for row in ROWS]
    losses = [
        nn.functional.cross_entropy(one[:-1], torch.tensor(row[1:]), reduction="sum")
        for one, row in zip(logits, ROWS, strict=True)
    ]
    (sum(losses, torch.zeros(())) / sum(len(row) - 1 for row in ROWS)).backward()
    return logits


def assert_close(found: Tensor, expected: Tensor, what: str) -> None:
    difference = float((found - expected).norm() / expected.norm())
    assert difference <= 1e-5, f"{what}: {difference:.1e}"


def assert_parity(folder: Path) -> None:
    """Logits, then gradients with respect to all weights, then to an adapter on all linear layers."""
    model = load_model(folder, device="cpu", dtype=torch.float32)
    assert isinstance(model, Decoder)
    peer, report = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not any(report.values()), report
    packed = batch()
    with torch.no_grad():
        found = model.logits(model.forward(packed.tokens, packed.positions, packed.lengths))
    learner = Learner.create(model, FullWeights(type="full"), SftHyperparameters(), seed=0)
    learner.forward_backward(packed, packed.scored)
    expected = torch.cat(peer_backward(peer)).detach()
    assert expected.std() > 0.1, "logits that are all alike would prove nothing"
    assert_close(found, expected, "logits")
    gradients = learner._parameters.named(learner._parameters.gradients)
    wanted = {name: p.grad for name, p in peer.named_parameters() if p.grad is not None}
    assert gradients.keys() == wanted.keys()
    for name, gradient in gradients.items():
        assert_close(gradient, wanted[name], name)


def assert_lora_parity(folder: Path, work: Path) -> None:
    model = load_model(folder, device="cpu", dtype=torch.float32)
    lora = attach(model, LoraAdapter(rank=3, alpha=6), seed=0)
    for view in lora.parameters.views.values():
        view.detach().add_(0.1 * torch.randn(view.shape, generator=torch.Generator().manual_seed(2)))
    export_peft(lora, work, base_model="tiny")
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    peer = peft.PeftModel.from_pretrained(base, work, is_trainable=True)
    learner = Learner(model, lora.parameters, lora, SftHyperparameters())
    packed = batch()
    learner.forward_backward(packed, packed.scored)
    peer_backward(peer)
    grads = {name: p.grad for name, p in peer.named_parameters() if p.grad is not None}
    found = lora.parameters.named(lora.parameters.gradients)
    assert len(found) == len(grads) == 2 * 7 * 3
    for name, gradient in found.items():
        assert_close(gradient, grads[f"base_model.model.{name}.default.weight"], name)


@pytest.mark.parametrize("heads", [2, 4], ids=["grouped", "one key head each"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_gradients_equal_those_of_transformers(tmp_path: Path, family: str, tied: bool, heads: int) -> None:
    config = FAMILIES[family] | {"tie_word_embeddings": tied, "num_key_value_heads": heads}
    assert_parity(make(tmp_path / "m", **config))


@pytest.mark.parametrize("family", FAMILIES)
def test_adapter_gradients_equal_those_of_peft(tmp_path: Path, family: str) -> None:
    assert_lora_parity(make(tmp_path / "m", **FAMILIES[family]), tmp_path / "adapter")


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_stretched_positions_equal_those_of_transformers(tmp_path: Path, family: str, rope: str) -> None:
    assert_parity(make(tmp_path / "m", **FAMILIES[family], rope_parameters=dict(ROPES[rope])))


@pytest.mark.parametrize("rope", ROPES)
def test_a_config_of_before_transformers_5_means_the_same(tmp_path: Path, rope: str) -> None:
    folder = make(tmp_path / "m", model_type="llama", rope_parameters=dict(ROPES[rope]))
    raw = json.loads((folder / "config.json").read_text())
    scaling = raw.pop("rope_parameters")
    old = {"rope_theta": scaling.pop("rope_theta"), "torch_dtype": raw.pop("dtype")}
    scaling["type"] = scaling.pop("rope_type")
    (folder / "config.json").write_text(json.dumps(raw | old | {"rope_scaling": scaling}))
    assert_parity(folder)


LEFT_OUT = {"hidden_act", "rms_norm_eps", "tie_word_embeddings", "rope_parameters", "attention_bias", "mlp_bias"}
LEFT_OUT |= {"sliding_window", "use_sliding_window", "layer_types", "max_window_layers"}
OWN_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"num_attention_heads": 4, "num_key_value_heads": 4},
    "mistral": {"num_attention_heads": 8, "num_key_value_heads": 8},
    "qwen2": {"num_attention_heads": 32, "num_key_value_heads": 32, "hidden_size": 64},
    "qwen3": {"num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 128},
}


@pytest.mark.parametrize("family", OWN_DEFAULTS)
def test_a_key_that_is_left_out_means_what_it_means_to_transformers(tmp_path: Path, family: str) -> None:
    folder = make(tmp_path / "m", model_type=family, **OWN_DEFAULTS[family])
    raw = json.loads((folder / "config.json").read_text())
    kept = {k: v for k, v in raw.items() if k not in LEFT_OUT | {"num_key_value_heads", "head_dim"}}
    (folder / "config.json").write_text(json.dumps(kept))
    assert_parity(folder)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_written_and_read_by_transformers(tmp_path: Path, family: str) -> None:
    folder = make(tmp_path / "m", **FAMILIES[family])
    model = load_model(folder, device="cpu", dtype=torch.float32)
    count = export_full(model, folder, tmp_path / "out")
    one, other = (AutoModelForCausalLM.from_pretrained(at, dtype=torch.float32) for at in (folder, tmp_path / "out"))
    assert count == sum(p.numel() for p in other.parameters())
    assert all(torch.equal(p, q) for p, q in zip(one.parameters(), other.parameters(), strict=True))
    assert one.config.to_dict() | {"_name_or_path": ""} == other.config.to_dict() | {"_name_or_path": ""}


@pytest.mark.parametrize(
    "config", [FAMILIES["mistral, wide window"], {"model_type": "llama", "rope_parameters": ROPES["dynamic"]}]
)
def test_a_row_beyond_what_the_model_sees_whole_is_refused(tmp_path: Path, config: dict[str, Any]) -> None:
    model = load_model(make(tmp_path / "m", **config), device="cpu", dtype=torch.float32)
    model.forward(torch.zeros(96, dtype=torch.int64), torch.arange(96), (96,))
    with pytest.raises(WorkerError, match=r"row_too_long_for_model.*at most 96 .*found 97"):
        model.forward(torch.zeros(97, dtype=torch.int64), torch.arange(97), (97,))
