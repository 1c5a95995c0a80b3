"""Reads a folder in the transformers layout into a decoder. Safetensors only: nothing in it can run code."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from finery_gpu_workers.errors import WorkerError
from finery_gpu_workers.models.config import DecoderConfig, read_config
from finery_gpu_workers.models.decoder import Block, Decoder, Projection
from finery_gpu_workers.models.pickles import refuse_pickles

_CPUINFO = Path("/proc/cpuinfo")


def stored_dtype(folder: Path) -> torch.dtype:
    """The type of the stored weights: of the embedding."""
    with safe_open(_shard_of(folder)["model.embed_tokens.weight"], framework="pt") as file:
        dtype: torch.dtype = file.get_tensor("model.embed_tokens.weight").dtype
        return dtype


def compute_dtype(stored: torch.dtype, device: str) -> torch.dtype:
    """The type that weights are kept and multiplied in: bf16, but float32 where the processor is faster at that.

    Per core: 500 GFLOP/s in bf16 against 110 in float32 on Zen 5, 70 against 115 on an Intel core without AMX.
    """
    if stored == torch.float32:
        return torch.float32
    on_cpu = torch.device(device).type == "cpu"
    return torch.float32 if on_cpu and not _multiplies_bf16_fast(_CPUINFO) else torch.bfloat16


def _multiplies_bf16_fast(cpuinfo: Path) -> bool:
    if not cpuinfo.exists():
        return False
    words = set(cpuinfo.read_text().split())
    return "amx_bf16" in words or {"AuthenticAMD", "avx512_bf16"} <= words


def load_decoder(folder: Path, *, device: str, dtype: torch.dtype) -> Decoder:
    """All weights on `device` in `dtype`, frozen. Raises WorkerError: `unsupported_model`, `invalid_model`, …"""
    config = read_config(folder)
    tensors = _read(folder, device, dtype)
    decoder = _assemble(config, tensors)
    # Some exports keep a copy of the tied matrix; buffers of the rotary embedding are recomputed.
    left = [name for name in tensors if name != "lm_head.weight" and not name.endswith("rotary_emb.inv_freq")]
    if left:
        raise _invalid(folder, f"expected the tensors of a Llama decoder only, found also `{left[0]}`")
    return decoder


def _shard_of(folder: Path) -> Mapping[str, Path]:
    """Tensor name → file."""
    refuse_pickles((path.name for path in folder.iterdir()), folder.name)
    paths = sorted(folder.glob("*.safetensors"))
    index = folder / "model.safetensors.index.json"
    if index.exists():
        names = json.loads(index.read_text())["weight_map"]
        paths = sorted({folder / Path(name).name for name in names.values()})
    if not paths:
        raise _invalid(folder, "expected .safetensors files, found none")
    shards: dict[str, Path] = {}
    for path in paths:
        try:
            with safe_open(path, framework="pt") as file:
                shards |= dict.fromkeys(file.keys(), path)
        except (OSError, SafetensorError) as error:
            raise _invalid(folder, f"{path.name} is not a readable safetensors file: {error}") from error
    return shards


def _read(folder: Path, device: str, dtype: torch.dtype) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    shards = _shard_of(folder)
    for path in sorted(set(shards.values())):
        with safe_open(path, framework="pt", device=device) as file:
            # A copy: a memory-mapped tensor would change or fault when the file does.
            tensors |= {name: file.get_tensor(name).to(dtype, copy=True) for name in file.keys()}  # noqa: SIM118
    return tensors


def _assemble(config: DecoderConfig, tensors: dict[str, Tensor]) -> Decoder:
    """Takes what it uses out of `tensors`."""
    embedding = _take(tensors, "model.embed_tokens.weight", (config.vocab, config.hidden))
    head = embedding if config.tied else _take(tensors, "lm_head.weight", (config.vocab, config.hidden))
    return Decoder(
        config=config,
        embedding=embedding,
        blocks=tuple(_block(config, tensors, f"model.layers.{n}") for n in range(config.layers)),
        norm=_take(tensors, "model.norm.weight", (config.hidden,)),
        head=head,
    )


def _block(config: DecoderConfig, tensors: dict[str, Tensor], prefix: str) -> Block:
    hidden, inner = config.hidden, config.intermediate
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim

    def projection(inputs: int, **sizes: int) -> Projection:
        names = tuple(f"{prefix}.{name.replace('__', '.')}" for name in sizes)
        parts = [_take(tensors, f"{n}.weight", (s, inputs)) for n, s in zip(names, sizes.values(), strict=True)]
        return Projection(parts[0] if len(parts) == 1 else torch.cat(parts), names, tuple(sizes.values()))

    return Block(
        attention_norm=_take(tensors, f"{prefix}.input_layernorm.weight", (hidden,)),
        qkv=projection(hidden, self_attn__q_proj=queries, self_attn__k_proj=keys, self_attn__v_proj=keys),
        o=projection(queries, self_attn__o_proj=hidden),
        mlp_norm=_take(tensors, f"{prefix}.post_attention_layernorm.weight", (hidden,)),
        gate_up=projection(hidden, mlp__gate_proj=inner, mlp__up_proj=inner),
        down=projection(inner, mlp__down_proj=hidden),
    )


def _take(tensors: dict[str, Tensor], name: str, shape: tuple[int, ...]) -> Tensor:
    tensor = tensors.pop(name, None)
    found = "none" if tensor is None else tuple(tensor.shape)
    if tensor is None or tuple(tensor.shape) != shape:
        raise WorkerError("invalid_model", f"`{name}`: expected a tensor of shape {shape}, found {found}")
    return tensor


def _invalid(folder: Path, what: str) -> WorkerError:
    return WorkerError("invalid_model", f"{folder.name}: {what}")
