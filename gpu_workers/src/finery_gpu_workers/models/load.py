"""The frozen base of a job: a model of the catalogue, then the checkpoints that the job builds on."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from finery_gpu_workers.errors import WorkerError
from finery_gpu_workers.models.assemble import EMBEDDING, HEAD, assemble
from finery_gpu_workers.models.config import DecoderConfig, read_config
from finery_gpu_workers.models.decoder import Decoder
from finery_gpu_workers.models.interface import Model
from finery_gpu_workers.models.merge import grow, merge
from finery_gpu_workers.models.parts import Part
from finery_gpu_workers.models.pickles import refuse_pickles
from finery_gpu_workers.models.tensors import invalid, read_tensors, stored_dtype

__all__ = ["Part", "compute_dtype", "load_model", "stored_dtype"]

_CPUINFO = Path("/proc/cpuinfo")


def compute_dtype(stored: torch.dtype, device: str) -> torch.dtype:
    """The type that weights are kept and multiplied in: bf16, but float32 where the processor is faster at that.

    Per core: 500 GFLOP/s in bf16 against 110 in float32 on Zen 5, 70 against 115 on an Intel core without AMX.
    """
    if stored in (torch.float32, torch.float64):
        return torch.float32
    on_cpu = torch.device(device).type == "cpu"
    return torch.float32 if on_cpu and not _multiplies_bf16_fast(_CPUINFO) else torch.bfloat16


def _multiplies_bf16_fast(cpuinfo: Path) -> bool:
    if not cpuinfo.exists():
        return False
    words = set(cpuinfo.read_text().split())
    return "amx_bf16" in words or {"AuthenticAMD", "avx512_bf16"} <= words


def load_model(
    folder: Path, parts: Sequence[Part] = (), *, device: str, dtype: torch.dtype, new_tokens: int = 0
) -> Model:
    """All weights on `device` in `dtype`, frozen; our decoder where it computes the architecture, else transformers'.

    A `full` part replaces everything before it. A `merge` part adds its adapter's product, computed in float32 and
    rounded once; matrices that it trained whole replace those of the model. Then the vocabulary grows by `new_tokens`.
    Raises WorkerError: `unsupported_model`, `invalid_model`, `unsafe_checkpoint_file`, `adapter_mismatch`, …
    """
    folder, merges = _start(folder, parts)
    refuse_pickles((path.name for path in folder.iterdir()), folder.name)
    try:
        config = read_config(folder)
    except WorkerError as error:
        if error.code != "unsupported_model":
            raise
        # Costs half a second and is not needed for most.
        from finery_gpu_workers.models.fallback import load_foreign

        reason = error.message
        return load_foreign(folder, merges, reason=reason, device=device, dtype=dtype, new_tokens=new_tokens)
    return _load_decoder(config, folder, merges, device=device, dtype=dtype, new_tokens=new_tokens)


def _load_decoder(
    config: DecoderConfig, folder: Path, merges: Sequence[Path], *, device: str, dtype: torch.dtype, new_tokens: int
) -> Decoder:
    weights = read_tensors(folder, device, dtype)
    if config.tied and (head := weights.pop(HEAD, None)) is not None and not torch.equal(head, weights[EMBEDDING]):
        # A copy of the tied matrix, which some exports keep, is fine.
        found = f"config.json ties the output matrix to the embedding, but `{HEAD}` is stored and differs"
        raise invalid(folder, f"{found}; set tie_word_embeddings to false")
    for adapter in merges:
        merge(weights, adapter, embedding=EMBEDDING, head=HEAD)
    grow(weights, new_tokens, (EMBEDDING, HEAD))
    rows = _rows(weights, config.vocab, changed=bool(merges or new_tokens))
    config = dataclasses.replace(config, vocab=rows, tied=config.tied and HEAD not in weights)
    return assemble(config, weights, folder.name)


def _start(folder: Path, parts: Sequence[Part]) -> tuple[Path, list[Path]]:
    """The folder whose weights come first, and the adapters that are merged into them."""
    whole = [number for number, part in enumerate(parts) if part.kind == "full"]
    if not whole:
        return folder, [part.folder for part in parts]
    return parts[whole[-1]].folder, [part.folder for part in parts[whole[-1] + 1 :]]


def _rows(weights: dict[str, Tensor], configured: int, *, changed: bool) -> int:
    """Of the vocabulary: as the config says, unless a part or new tokens made more."""
    return len(weights[EMBEDDING]) if changed and EMBEDDING in weights else configured
