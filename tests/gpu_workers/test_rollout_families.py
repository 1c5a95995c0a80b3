"""Rollouts of every family, through our decoder or transformers: greedy equals `generate`, drawn ones their scores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from finery.types.methods import EmbeddingName, LoraAdapter
from finery_gpu_workers.errors import WorkerError
from finery_gpu_workers.models.load import load_model
from finery_gpu_workers.models.peft_layout import export_peft
from finery_gpu_workers.rollout.engine import Engine
from finery_gpu_workers.rollout.types import Completion, Group, Sampling, Spent

from .test_models_fallback import OTHERS, make, shaken
from .test_models_families import FAMILIES, ROPES

torch.set_num_threads(1)

NEW = 16
LENGTHS = (1, 7, 40, 12)
PROMPTS = [tuple(torch.randint(120, (n,), generator=torch.Generator().manual_seed(n)).tolist()) for n in LENGTHS]
GROUPS = [Group(n, prompt, (n, n + 50)) for n, prompt in enumerate(PROMPTS)]
OURS: dict[str, dict[str, Any]] = FAMILIES | {
    f"llama, {name}": {"model_type": "llama", "rope_parameters": dict(rope)} for name, rope in ROPES.items()
}
# Every kind of cache that transformers makes here: with a window, without, with learned positions.
THEIRS: dict[str, dict[str, Any]] = {name: {"model_type": name} | config for name, config in OTHERS.items()}


def peer_of(folder: Path) -> Any:
    peer = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    peer.generation_config.eos_token_id = None
    return peer


def rollouts(engine: Engine, **settings: Any) -> list[Completion]:
    found = list(engine.generate(GROUPS, Sampling(max_new_tokens=NEW, **settings), 1))
    assert sorted((one.group, one.sample) for one in found) == [(n, sample) for n in range(4) for sample in range(2)]
    return found


def assert_as_peer(engine: Engine, peer: Any) -> None:
    for one in rollouts(engine, temperature=0.0):
        prompt = PROMPTS[one.group]
        ids = torch.tensor([prompt])
        answer = peer.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False, pad_token_id=0
        )
        assert one.tokens == answer[0, len(prompt) :].tolist()
        assert_scores(one, peer, 1.0)
    drawn = rollouts(engine, temperature=1.4)
    assert len({tuple(one.tokens) for one in drawn}) == 8
    for one in drawn:
        assert_scores(one, peer, 1.4)


@torch.no_grad()
def assert_scores(one: Completion, peer: Any, temperature: float) -> None:
    """Of one uncached pass over the whole row."""
    prompt = PROMPTS[one.group]
    row = torch.tensor([*prompt, *one.tokens])
    logits = peer(input_ids=row[None], use_cache=False).logits[0, len(prompt) - 1 : -1]
    expected = torch.log_softmax(logits / temperature, -1).gather(1, row[len(prompt) :, None])[:, 0]
    torch.testing.assert_close(torch.tensor(one.log_probs), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("case", [*OURS, *(f"transformers, {name}" for name in THEIRS)])
def test_greedy_equals_generate_and_log_probs_an_uncached_pass(tmp_path: Path, case: str) -> None:
    kind = case.removeprefix("transformers, ")
    config = dict(THEIRS[kind] if kind != case else OURS[case])
    folder = make(tmp_path / "m", config.pop("model_type"), **config)
    model = load_model(folder, device="cpu", dtype=torch.float32)
    assert model.engine == ("finery" if kind == case else "transformers")
    spent = Spent()
    assert_as_peer(Engine(model, text_of=str, max_rows=3, spent=spent), peer_of(folder))
    assert spent == Spent(prefill=2 * sum(LENGTHS), prefill_cached=2 * sum(LENGTHS), generated=2 * 8 * NEW)


HEAD = ("lm_head",)
ADAPTED = [("llama", ()), ("llama", HEAD), ("qwen2", ()), ("gemma2", ()), ("gemma2", HEAD), ("gpt_neox", ())]


@pytest.mark.parametrize(("kind", "saved"), ADAPTED)
def test_with_an_adapter_it_equals_peft(tmp_path: Path, kind: str, saved: tuple[EmbeddingName, ...]) -> None:
    folder = make(tmp_path / "m", kind, **OTHERS.get(kind, {}))
    model = load_model(folder, device="cpu", dtype=torch.float32)
    lora = shaken(model, LoraAdapter(rank=3, alpha=6, modules_to_save=saved))
    export_peft(lora, tmp_path / "a", base_model="tiny")
    peer = peft.PeftModel.from_pretrained(peer_of(folder), tmp_path / "a")
    assert_as_peer(Engine(model, text_of=str, max_rows=5), peer)


def test_an_adapter_on_some_layers_only(tmp_path: Path) -> None:
    """Of stacked matrices some parts have no adapter."""
    folder = make(tmp_path / "m", "llama")
    model = load_model(folder, device="cpu", dtype=torch.float32)
    lora = shaken(model, LoraAdapter(rank=3, alpha=6, targets=("v_proj", "up_proj")))
    export_peft(lora, tmp_path / "a", base_model="tiny")
    assert_as_peer(
        Engine(model, text_of=str, max_rows=5), peft.PeftModel.from_pretrained(peer_of(folder), tmp_path / "a")
    )


def test_learned_positions_end_somewhere(tmp_path: Path) -> None:
    folder = make(tmp_path / "m", "gpt2", **OTHERS["gpt2"])
    engine = Engine(load_model(folder, device="cpu", dtype=torch.float32), text_of=str, max_rows=3)
    assert len(list(engine.generate(GROUPS, Sampling(max_new_tokens=56), 0))) == 8
    with pytest.raises(WorkerError, match=r"at most 96 tokens.* a prompt of 40 with up to 57 new ones"):
        list(engine.generate(GROUPS, Sampling(max_new_tokens=57), 0))
