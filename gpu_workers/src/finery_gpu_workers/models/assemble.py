"""Tensors under their transformers names → our decoder."""

from __future__ import annotations

import torch
from torch import Tensor

from finery_gpu_workers.errors import WorkerError
from finery_gpu_workers.models.config import DecoderConfig
from finery_gpu_workers.models.decoder import Block, Decoder, Projection

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def assemble(config: DecoderConfig, tensors: dict[str, Tensor], where: str) -> Decoder:
    """Takes what it uses out of `tensors`; the output matrix is the embedding where `config.tied`.

    Raises WorkerError `invalid_model` naming the first tensor that is missing, misshapen or not of this architecture.
    """
    embedding = _take(tensors, EMBEDDING, (config.vocab, config.hidden))
    head = embedding if config.tied else _take(tensors, HEAD, (config.vocab, config.hidden))
    decoder = Decoder(
        config=config,
        embedding=embedding,
        blocks=tuple(_block(config, tensors, f"model.layers.{n}") for n in range(config.layers)),
        norm=_take(tensors, "model.norm.weight", (config.hidden,)),
        head=head,
    )
    # Buffers of the rotary embedding, which old exports have, are recomputed.
    left = [name for name in tensors if not name.endswith("rotary_emb.inv_freq")]
    if left:
        message = f"{where}: expected the tensors of a {config.family} decoder only, found also `{left[0]}`"
        raise WorkerError("invalid_model", message)
    return decoder


def _block(config: DecoderConfig, tensors: dict[str, Tensor], prefix: str) -> Block:
    hidden, inner = config.hidden, config.intermediate
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim

    def vector(name: str, size: int) -> Tensor:
        return _take(tensors, f"{prefix}.{name}.weight", (size,))

    def projection(inputs: int, sizes: dict[str, int], *, bias: bool) -> Projection:
        layers = {f"{prefix}.{name}": size for name, size in sizes.items()}
        weight = _joined([_take(tensors, f"{name}.weight", (size, inputs)) for name, size in layers.items()])
        biases = [_take(tensors, f"{name}.bias", (size,)) for name, size in layers.items()] if bias else []
        return Projection(weight, tuple(layers), tuple(layers.values()), _joined(biases) if bias else None)

    qkv = {"self_attn.q_proj": queries, "self_attn.k_proj": keys, "self_attn.v_proj": keys}
    return Block(
        attention_norm=vector("input_layernorm", hidden),
        qkv=projection(hidden, qkv, bias=config.qkv_bias),
        o=projection(queries, {"self_attn.o_proj": hidden}, bias=config.o_bias),
        mlp_norm=vector("post_attention_layernorm", hidden),
        gate_up=projection(hidden, {"mlp.gate_proj": inner, "mlp.up_proj": inner}, bias=config.mlp_bias),
        down=projection(inner, {"mlp.down_proj": hidden}, bias=config.mlp_bias),
        q_norm=vector("self_attn.q_norm", config.head_dim) if config.qk_norm else None,
        k_norm=vector("self_attn.k_norm", config.head_dim) if config.qk_norm else None,
    )


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _take(tensors: dict[str, Tensor], name: str, shape: tuple[int, ...]) -> Tensor:
    tensor = tensors.pop(name, None)
    found = "none" if tensor is None else tuple(tensor.shape)
    if tensor is None or tuple(tensor.shape) != shape:
        raise WorkerError("invalid_model", f"`{name}`: expected a tensor of shape {shape}, found {found}")
    return tensor
