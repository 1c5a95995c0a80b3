"""`python -m finery_gpu_workers.models.convert_gguf FILE FOLDER`: GGUF → the transformers layout, weights in bf16.

A process of its own: it needs transformers and several times the model's size in memory, a worker needs neither.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>")


def convert(gguf: Path, folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    read = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16)
    # The weights are plain now, but the config still says that they are quantised, and a model read from GGUF
    # refuses to be saved: a fresh one of the same config takes them over.
    del read.config.quantization_config
    model = AutoModelForCausalLM.from_config(read.config, dtype=torch.bfloat16)
    model.load_state_dict(read.state_dict())
    model.tie_weights()
    model.generation_config = _generation(tokenizer)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _generation(tokenizer: AutoTokenizer) -> GenerationConfig:
    """GGUF names one end token. Generation stops at the end of a turn, too, where the vocabulary has such a token."""
    vocabulary = tokenizer.get_vocab()
    turns = [vocabulary[token] for token in END_OF_TURN if token in vocabulary]
    ends = [*turns, *(i for i in (tokenizer.eos_token_id,) if i is not None and i not in turns)]
    return GenerationConfig(bos_token_id=tokenizer.bos_token_id, eos_token_id=ends, pad_token_id=tokenizer.pad_token_id)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
