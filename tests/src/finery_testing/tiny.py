"""A random tiny Llama with a byte tokenizer (F-TOK) and the ChatML template (F-CHAT), in the transformers layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

BOS, EOS, PAD, IM_START, IM_END = 256, 257, 258, 259, 260
SPECIAL = ("<|bos|>", "<|eos|>", "<|pad|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 261,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": True,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
    "dtype": "float32",
}


def make_tiny_model(folder: Path, seed: int = 0, **overrides: Any) -> Path:
    """Writes model, tokenizer, chat template into `folder`; `overrides` replace keys of `CONFIG`."""
    folder.mkdir(parents=True, exist_ok=True)
    config = CONFIG | overrides
    generation = {"bos_token_id": BOS, "eos_token_id": [IM_END, EOS], "pad_token_id": PAD}
    tokenizer = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL[0],
        "eos_token": SPECIAL[1],
        "pad_token": SPECIAL[2],
        "clean_up_tokenization_spaces": False,
        "model_max_length": config["max_position_embeddings"],
    }
    for name, value in {"config": config, "generation_config": generation, "tokenizer_config": tokenizer}.items():
        (folder / f"{name}.json").write_text(json.dumps(value, indent=2))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    save_file(_weights(config, seed), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def byte_tokenizer() -> Tokenizer:
    """Ids 0-255 are UTF-8 bytes, 256-260 the special tokens."""
    tokenizer = Tokenizer(models.BPE(vocab={char: byte for byte, char in _byte_characters().items()}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    return tokenizer


def _byte_characters() -> dict[int, str]:
    """The printable stand-in of each byte that the ByteLevel pre-tokenizer uses (GPT-2's table)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {byte: chr(byte) for byte in printable}
    others = (byte for byte in range(256) if byte not in table)
    return table | {byte: chr(256 + n) for n, byte in enumerate(others)}


def _weights(config: dict[str, Any], seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def normal(rows: int, columns: int, std: float) -> Tensor:
        return (torch.randn(rows, columns, generator=generator) * std).to(getattr(torch, config["dtype"]))

    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    shapes = {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    weights = {"model.embed_tokens.weight": normal(config["vocab_size"], hidden, 0.1)}
    for layer in range(config["num_hidden_layers"]):
        for name, (rows, columns) in shapes.items():
            weights[f"model.layers.{layer}.{name}.weight"] = normal(rows, columns, columns**-0.5)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            weights[f"model.layers.{layer}.{norm}.weight"] = 1.0 + 0.1 * normal(1, hidden, 1.0)[0]
    weights["model.norm.weight"] = 1.0 + 0.1 * normal(1, hidden, 1.0)[0]
    if not config["tie_word_embeddings"]:
        weights["lm_head.weight"] = normal(config["vocab_size"], hidden, 0.1)
    return weights
