"""LoRA against PEFT, and what is said when an adapter does not fit."""

from __future__ import annotations

import json
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from finery.types.methods import LoraAdapter
from finery_gpu_workers.batch import pack
from finery_gpu_workers.errors import WorkerError
from finery_gpu_workers.models.interface import Model
from finery_gpu_workers.models.load import load_model
from finery_gpu_workers.models.lora import Lora, attach
from finery_gpu_workers.models.peft_layout import export_peft, load_peft, read_stored
from finery_testing.tiny import make_tiny_model

torch.set_num_threads(1)

TOKENS = torch.randint(0, 261, (40,), generator=torch.Generator().manual_seed(0))
ADAPTERS = [
    LoraAdapter(rank=4, alpha=8),
    LoraAdapter(rank=3, alpha=7.5, targets=("k_proj", "v_proj", "down_proj")),
    LoraAdapter(rank=1, alpha=1, targets=("gate_proj",)),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path / "model")


def adapted(folder: Path, adapter: LoraAdapter, *, trained: bool) -> tuple[Model, Lora]:
    decoder = load_model(folder, device="cpu", dtype=torch.float32)
    lora = attach(decoder, adapter, seed=1)
    if trained:
        lora.parameters.values.copy_(
            torch.randn(lora.parameters.values.shape, generator=torch.Generator().manual_seed(9))
        )
        lora.parameters.values.mul_(0.2)
    return decoder, lora


@torch.no_grad()
def logits_of(decoder: Model) -> Tensor:
    batch = pack([(TOKENS.tolist(), [1.0] * len(TOKENS))])
    return decoder.logits(decoder.forward(batch.tokens, batch.positions, batch.lengths))


def base_logits(folder: Path) -> Tensor:
    return logits_of(load_model(folder, device="cpu", dtype=torch.float32))


@pytest.mark.parametrize("adapter", ADAPTERS, ids=["all", "some", "half of a stack"])
def test_d09_d10_peft_loads_the_export_and_gives_the_same_logits(
    folder: Path, tmp_path: Path, adapter: LoraAdapter
) -> None:
    decoder, lora = adapted(folder, adapter, trained=True)
    export_peft(lora, tmp_path / "adapter", base_model="tiny")
    ours = logits_of(decoder)
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    peer = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    with torch.no_grad():
        expected = peer(TOKENS[None]).logits[0]
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=2e-5)
    assert (ours - base_logits(folder)).abs().max() > 0.1, "the adapter does nothing"


def test_the_export_has_exactly_the_keys_that_peft_itself_would_write(folder: Path, tmp_path: Path) -> None:
    _, lora = adapted(folder, ADAPTERS[1], trained=True)
    export_peft(lora, tmp_path / "ours", base_model="tiny")
    config = peft.LoraConfig(r=3, lora_alpha=7.5, target_modules=["k_proj", "v_proj", "down_proj"])
    peft.get_peft_model(AutoModelForCausalLM.from_pretrained(folder), config).save_pretrained(tmp_path / "peft")
    ours, theirs = (load_file(tmp_path / who / "adapter_model.safetensors") for who in ("ours", "peft"))
    assert {k: v.shape for k, v in ours.items()} == {k: v.shape for k, v in theirs.items()}


def test_a_fresh_adapter_changes_nothing_and_is_drawn_like_pefts(folder: Path) -> None:
    decoder, lora = adapted(folder, ADAPTERS[0], trained=False)
    assert torch.equal(logits_of(decoder), base_logits(folder))
    for name, view in lora.parameters.named(lora.parameters.values).items():
        bound = view.shape[1] ** -0.5
        assert float(view.abs().max()) <= bound
        if name.endswith("lora_B"):
            assert not view.any()
        else:
            assert float(view.std()) == pytest.approx(bound / 3**0.5, rel=0.25)


def test_the_seed_alone_decides_the_fresh_adapter(folder: Path) -> None:
    def values(seed: int) -> Tensor:
        decoder = load_model(folder, device="cpu", dtype=torch.float32)
        return attach(decoder, ADAPTERS[0], seed).parameters.values

    assert torch.equal(values(5), values(5))
    assert not torch.equal(values(5), values(6))


def test_an_export_of_ours_or_of_pefts_loads_back(folder: Path, tmp_path: Path) -> None:
    decoder, lora = adapted(folder, ADAPTERS[0], trained=True)
    export_peft(lora, tmp_path / "ours", base_model="tiny")
    fresh, fresh_lora = adapted(folder, read_stored(tmp_path / "ours").adapter, trained=False)
    load_peft(fresh_lora, tmp_path / "ours")
    assert torch.equal(logits_of(fresh), logits_of(decoder))

    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    peer = peft.PeftModel.from_pretrained(base, tmp_path / "ours")
    peer.save_pretrained(tmp_path / "peft")
    again, again_lora = adapted(folder, read_stored(tmp_path / "peft").adapter, trained=False)
    load_peft(again_lora, tmp_path / "peft")
    assert torch.equal(logits_of(again), logits_of(decoder))


def rewrite(folder: Path, change: dict[str, Tensor | None], prefix: str = "") -> None:
    path = folder / "adapter_model.safetensors"
    tensors = {k.replace("model.layers", f"{prefix}model.layers"): v for k, v in load_file(path).items()}
    save_file({k: v for k, v in (tensors | change).items() if v is not None}, path)


KEY = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.mark.parametrize(
    ("change", "prefix", "named"),
    [
        ({}, "language_model.", "base_model.model.language_model.model.layers.0.mlp.down_proj.lora_A.weight"),
        ({"base_model.model.lm_head.lora_A.weight": torch.zeros(4, 32)}, "", "lm_head"),
        ({KEY: None}, "", KEY),
        ({KEY: torch.zeros(4, 31)}, "", KEY),
    ],
    ids=["prefix", "extra", "missing", "shape"],
)
def test_d10_an_adapter_that_does_not_fit_names_the_first_key_and_changes_nothing(
    folder: Path, tmp_path: Path, change: dict[str, Tensor | None], prefix: str, named: str
) -> None:
    _, lora = adapted(folder, ADAPTERS[0], trained=True)
    export_peft(lora, tmp_path / "adapter", base_model="tiny")
    rewrite(tmp_path / "adapter", change, prefix)
    _, fresh = adapted(folder, ADAPTERS[0], trained=False)
    before = fresh.parameters.values.clone()
    with pytest.raises(WorkerError, match="adapter_mismatch") as caught:
        load_peft(fresh, tmp_path / "adapter")
    assert named in caught.value.message
    assert torch.equal(fresh.parameters.values, before)


def test_d10_an_empty_adapter_file_is_refused(folder: Path, tmp_path: Path) -> None:
    _, lora = adapted(folder, ADAPTERS[0], trained=False)
    export_peft(lora, tmp_path / "adapter", base_model="tiny")
    save_file({}, tmp_path / "adapter" / "adapter_model.safetensors")
    with pytest.raises(WorkerError, match="empty file"):
        load_peft(lora, tmp_path / "adapter")


def test_h01_a_pickled_adapter_is_refused(folder: Path, tmp_path: Path) -> None:
    _, lora = adapted(folder, ADAPTERS[0], trained=False)
    export_peft(lora, tmp_path / "adapter", base_model="tiny")
    (tmp_path / "adapter" / "adapter_model.bin").write_bytes(b"\x80\x04N.")
    with pytest.raises(WorkerError, match="unsafe_checkpoint_file") as caught:
        load_peft(lora, tmp_path / "adapter")
    assert "adapter_model.bin" in caught.value.message


@pytest.mark.parametrize(
    ("key", "value"),
    [("use_dora", True), ("use_rslora", True), ("trainable_token_indices", [7]), ("rank_pattern", {"q_proj": 2})],
)
def test_a_variant_of_lora_that_we_would_apply_wrongly_is_refused(
    folder: Path, tmp_path: Path, key: str, value: object
) -> None:
    _, lora = adapted(folder, ADAPTERS[0], trained=False)
    export_peft(lora, tmp_path, base_model="tiny")
    config = tmp_path / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {key: value}))
    with pytest.raises(WorkerError, match=f"unsupported_adapter.*`{key}`"):
        load_peft(lora, tmp_path)


def test_another_rank_is_refused(folder: Path, tmp_path: Path) -> None:
    _, lora = adapted(folder, ADAPTERS[0], trained=False)
    export_peft(lora, tmp_path, base_model="tiny")
    _, other = adapted(folder, LoraAdapter(rank=2, alpha=8), trained=False)
    with pytest.raises(WorkerError, match="expected rank 2"):
        load_peft(other, tmp_path)
