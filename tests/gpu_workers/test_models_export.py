"""Whole models that we write, read back by transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from finery.types.methods import EmbeddingName, LoraAdapter, SftHyperparameters
from finery_gpu_workers.batch import pack
from finery_gpu_workers.learner import Learner
from finery_gpu_workers.models.export import export_full, export_merged
from finery_gpu_workers.models.interface import Model
from finery_gpu_workers.models.load import load_model
from finery_gpu_workers.models.lora import Lora, attach
from finery_testing.tiny import make_tiny_model

torch.set_num_threads(1)

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
TOKENS = torch.randint(0, 261, (60,), generator=torch.Generator().manual_seed(0)).tolist()
PROMPTS = [torch.randint(0, 261, (9,), generator=torch.Generator().manual_seed(n)).tolist() for n in range(8)]
ANSWERS = [[65 + n] * 6 + [257] for n in range(8)]


@torch.no_grad()
def logits_of(model: Model, tokens: list[int] = TOKENS) -> Tensor:
    batch = pack([(tokens, [1.0] * len(tokens))])
    return model.logits(model.forward(batch.tokens, batch.positions, batch.lengths))


@torch.no_grad()
def peer_logits(folder: Path, dtype: torch.dtype = torch.float32) -> Tensor:
    peer, report = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, output_loading_info=True)
    assert not any(report.values()), report
    logits: Tensor = peer(torch.tensor([TOKENS])).logits[0]
    return logits


def parameters_of(folder: Path) -> int:
    """Once loaded; a tied matrix counts once."""
    return int(sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(folder).parameters()))


def shaken(lora: Lora, by: float = 0.2) -> Lora:
    """As if trained: the low-rank ones are drawn anew, whole matrices moved a little."""
    generator = torch.Generator().manual_seed(9)
    for name, view in lora.parameters.views.items():
        noise = torch.randn(view.shape, generator=generator) * by
        view.detach().copy_(noise if ".lora_" in name else view.detach() + noise)
    lora.refresh()
    return lora


@pytest.mark.parametrize("tied", [True, False])
def test_d07_a_whole_model_is_stored_as_its_flag_says_and_reloads_equal(tmp_path: Path, tied: bool) -> None:
    source = make_tiny_model(tmp_path / "m", 3, tie_word_embeddings=tied)
    model = load_model(source, device="cpu", dtype=torch.float32)
    for _, weight in model.named_weights():  # as if trained
        weight += 0.02 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
    count = export_full(model, source, tmp_path / "out")
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert (HEAD in stored) is not tied
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is tied
    assert count == sum(t.numel() for t in stored.values()) == parameters_of(tmp_path / "out")
    torch.testing.assert_close(peer_logits(tmp_path / "out"), logits_of(model), rtol=0, atol=1e-5)
    assert (logits_of(model) - peer_logits(source)).abs().max() > 1e-2, "nothing was trained"
    again = load_model(tmp_path / "out", device="cpu", dtype=torch.float32)
    assert torch.equal(logits_of(again), logits_of(model))


@pytest.mark.parametrize("saved", [("lm_head",), ("embed_tokens", "lm_head"), ("embed_tokens",)])
def test_d07_matrices_that_training_parts_are_both_stored(tmp_path: Path, saved: tuple[EmbeddingName, ...]) -> None:
    """Of a tied model; the embedding alone stays the output matrix, too."""
    source = make_tiny_model(tmp_path / "m", 3)
    model = load_model(source, device="cpu", dtype=torch.float32)
    lora = shaken(attach(model, LoraAdapter(rank=2, alpha=4, modules_to_save=saved), seed=0))
    count = export_merged(model, lora, source, tmp_path / "out")
    stored = load_file(tmp_path / "out" / "model.safetensors")
    parted = "lm_head" in saved
    assert (HEAD in stored) is parted
    assert not parted or not torch.equal(stored[HEAD], stored[EMBEDDING])
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is not parted
    assert count == parameters_of(tmp_path / "out") == sum(t.numel() for t in stored.values())
    torch.testing.assert_close(peer_logits(tmp_path / "out"), logits_of(model), rtol=0, atol=5e-5)


def test_a_bf16_model_is_written_bit_for_bit_with_its_config(tmp_path: Path) -> None:
    left_over = {"_name_or_path": "/secret/of/ours", "quantization_config": None}
    old = {"torch_dtype": "float32"}
    source = make_tiny_model(tmp_path / "m", 3, dtype="bfloat16", tie_word_embeddings=False, **left_over, **old)
    model = load_model(source, device="cpu", dtype=torch.bfloat16)
    export_full(model, source, tmp_path / "out")
    before, after = (load_file(folder / "model.safetensors") for folder in (source, tmp_path / "out"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert torch.equal(peer_logits(tmp_path / "out", torch.bfloat16), peer_logits(source, torch.bfloat16))
    configs = [json.loads((folder / "config.json").read_text()) for folder in (source, tmp_path / "out")]
    kept = {key: value for key, value in configs[0].items() if key not in left_over}
    assert configs[1] == kept | {"torch_dtype": "bfloat16"}


@pytest.mark.parametrize("limit", [20_000, 1])
def test_weights_beyond_the_limit_go_into_files_with_an_index(tmp_path: Path, limit: int) -> None:
    source = make_tiny_model(tmp_path / "m", 3)
    model = load_model(source, device="cpu", dtype=torch.float32)
    count = export_full(model, source, tmp_path / "out", shard_bytes=limit)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = {path.name: load_file(path) for path in (tmp_path / "out").glob("*.safetensors")}
    assert len(files) > 1
    assert {name: file for file, part in files.items() for name in part} == index["weight_map"]
    assert all(len(part) == 1 or sum(t.nbytes for t in part.values()) <= limit for part in files.values())
    assert index["metadata"]["total_size"] == 4 * count
    assert torch.equal(peer_logits(tmp_path / "out"), peer_logits(source))
    assert torch.equal(logits_of(load_model(tmp_path / "out", device="cpu", dtype=torch.float32)), logits_of(model))


def greedy(model: Model, prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(logits_of(model, tokens)[-1].argmax()))
    return tokens[len(prompt) :]


def taught(model: Model) -> Lora:
    """An adapter of rank 2 that answers each prompt with a letter of its own, six times, and the end token."""
    lora = attach(model, LoraAdapter(rank=2, alpha=6), seed=0)
    learner = Learner(model, lora.parameters, lora, SftHyperparameters())
    batch = pack([([*prompt, *ANSWERS[n]], [0.0] * 9 + [1.0] * 7) for n, prompt in enumerate(PROMPTS)])
    for _ in range(100):
        learner.forward_backward(batch, batch.scored)
        learner.optim_step(1e-2)
    return lora


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_d08_a_merge_is_the_float32_sum_rounded_once_and_answers_alike(tmp_path: Path, dtype: torch.dtype) -> None:
    source = make_tiny_model(tmp_path / "m", 3, dtype=str(dtype).removeprefix("torch."))
    model = load_model(source, device="cpu", dtype=dtype)
    lora = taught(model)
    export_merged(model, lora, source, tmp_path / "out")
    base, stored = (load_file(folder / "model.safetensors") for folder in (source, tmp_path / "out"))
    views = {name: view.detach() for name, view in lora.parameters.views.items()}
    changed = 0
    for name, weight in base.items():
        module = name.removesuffix(".weight")
        expected = weight
        if f"{module}.lora_A" in views:
            product = views[f"{module}.lora_B"] @ views[f"{module}.lora_A"]
            expected = (weight.to(torch.float32) + 3.0 * product).to(dtype)  # alpha / rank = 3
            changed += int(not torch.equal(expected, weight))
        assert stored[name].dtype == dtype
        assert torch.equal(stored[name], expected), name
    assert changed == 14, "seven layers in each of two blocks"
    merged = load_model(tmp_path / "out", device="cpu", dtype=dtype)
    for one in (model, merged):
        assert [greedy(one, prompt, 7) for prompt in PROMPTS] == ANSWERS
