"""Models that our decoder does not compute, loaded through transformers; the one place that imports it to train.

No code of the model's own is run, nothing is fetched, only safetensors are read. What would be computed wrongly is
refused by name, and what can only be seen on numbers is tried on random tokens after loading.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM, __version__
from transformers.utils.logging import disable_progress_bar

from finery_gpu_workers.errors import WorkerError
from finery_gpu_workers.models.config import read_json
from finery_gpu_workers.models.foreign import ForeignModel
from finery_gpu_workers.models.merge import grow, merge
from finery_gpu_workers.models.tensors import invalid, shards

# Of the largest logit: what the same sum may differ by when it is taken in another order.
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 1e-2}

_COMPOSITE = {"text_config", "vision_config", "audio_config"}


def check_architecture(folder: Path, reason: str) -> Any:
    """The model without its weights, once it is clear that transformers computes it and that we could train it.

    `reason`: why our decoder does not. Raises WorkerError `unsupported_model`.
    """
    raw = read_json(folder / "config.json")
    if raw.get("quantization_config") is not None:
        raise _unsupported(reason, "its weights are quantised; use the model that they were made from")
    if any(rope.get("rope_type", rope.get("type")) == "dynamic" for rope in _ropes(raw)):
        raise _unsupported(reason, "with rope_type `dynamic` its answer depends on the rows that it saw before")
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # code of every architecture there is, which may raise anything
        said = " ".join(str(error).split()).replace(str(folder), "its folder")  # customers see it
        raise _unsupported(reason, f"transformers {__version__} cannot read its config.json: {said}") from error
    if config.is_encoder_decoder:
        raise _unsupported(reason, "an encoder with a decoder is not trained here")
    if parts := sorted(_COMPOSITE & set(config.sub_configs)):
        raise _unsupported(reason, f"a composite of {', '.join(parts)} is not trained here")
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise _unsupported(reason, f"`{config.model_type}` has no causal language model in transformers {__version__}")
    try:
        with torch.device("meta"):
            net = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    except Exception as error:
        raise _unsupported(reason, f"transformers {__version__} cannot build it: {error}") from error
    _check_modules(net, reason)
    return net


def load_foreign(
    folder: Path, merges: Sequence[Path], *, reason: str, device: str, dtype: torch.dtype, new_tokens: int
) -> ForeignModel:
    """Raises WorkerError: `unsupported_model`, `invalid_model`, `adapter_mismatch`, …"""
    shards(folder)  # refuses pickles and what is no safetensors file
    if (folder / "adapter_config.json").exists():  # transformers would load the model that it names instead
        raise invalid(folder, "expected the weights of a model, found also adapter_config.json")
    config = check_architecture(folder, reason).config
    net = _read(folder, config, dtype).to(device)
    net.eval().requires_grad_(False)
    # Nothing is padded here, and what a model pads with is often the token that ends its turns: it is trained.
    net.get_input_embeddings().padding_idx = None
    _build_on(net, merges, new_tokens, reason)
    model = ForeignModel(net, reason)
    _try(model, reason)
    return model


def _ropes(raw: dict[str, Any]) -> list[dict[str, Any]]:
    """The rope's keys, or those of each kind of layer."""
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    return [rope, *(one for one in rope.values() if isinstance(one, dict))]


def _check_modules(net: Any, reason: str) -> None:
    stacked = [name for name, weight in net.named_parameters() if weight.ndim > 2]
    if stacked:
        what = f"`{stacked[0]}` has more than two dimensions (experts in one tensor, or a convolution)"
        raise _unsupported(reason, f"{what}, which adapters and exports here do not know")
    names = {name for name, _ in net.named_parameters(remove_duplicate=False)}
    kept = sorted(net.state_dict().keys() - names)
    if kept:
        raise _unsupported(reason, f"it stores `{kept[0]}`, which is no weight")
    if net.base_model is net or not isinstance(net.get_output_embeddings(), nn.Linear):
        raise _unsupported(reason, "its output matrix does not stand apart from its layers")
    embedding, head = net.get_input_embeddings().weight, net.get_output_embeddings().weight
    if not len(embedding) == len(head) == net.config.vocab_size:
        rows = f"vocab_size {net.config.vocab_size}, {len(embedding)} rows of input and {len(head)} of output"
        raise _unsupported(reason, f"expected one size of vocabulary, found {rows}")
    if not any(
        weight is embedding for name, weight in net.named_parameters() if name.startswith(net.base_model_prefix)
    ):
        raise _unsupported(reason, "its embedding is not found below its layers")


def _read(folder: Path, config: Any, dtype: torch.dtype) -> Any:
    disable_progress_bar()
    try:
        net, report = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            attn_implementation="eager",
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except Exception as error:
        raise invalid(folder, f"transformers {__version__} cannot load it: {error}") from error
    for what, names in report.items():
        if names:  # transformers would go on with random weights
            raise invalid(folder, f"{what.replace('_', ' ')}: {sorted(map(str, names))[0]} (of {len(names)})")
    if config.tie_word_embeddings and net.get_input_embeddings().weight is not net.get_output_embeddings().weight:
        found = "config.json ties the output matrix to the embedding, but both are stored and differ"
        raise invalid(folder, f"{found}; set tie_word_embeddings to false")
    return net


@torch.no_grad()
def _build_on(net: Any, merges: Sequence[Path], new_tokens: int, reason: str) -> None:
    """Merges and new rows, in the model's own modules."""
    modules = {name: module for name, module in net.named_modules() if hasattr(module, "weight")}
    embedding, head = (
        next(f"{name}.weight" for name, module in modules.items() if module is wanted)
        for wanted in (net.get_input_embeddings(), net.get_output_embeddings())
    )
    weights: dict[str, Tensor] = dict(net.named_parameters())
    before = dict(weights)
    for folder in merges:
        merge(weights, folder, embedding=embedding, head=head)
    grow(weights, new_tokens, (embedding, head))
    rows = len(weights[embedding])
    if rows != len(before[embedding]) and net.get_output_embeddings().bias is not None:
        raise _unsupported(reason, "its output matrix has a bias, so its vocabulary cannot grow here")
    for name, weight in weights.items():
        if weight is not before.get(name):
            module = modules[name.removesuffix(".weight")]
            module.weight = nn.Parameter(weight, requires_grad=False)
    if head not in weights:
        net.get_output_embeddings().weight = net.get_input_embeddings().weight
    net.config.vocab_size = net.get_input_embeddings().num_embeddings = net.get_output_embeddings().out_features = rows


@torch.no_grad()
def _try(model: ForeignModel, reason: str) -> None:
    """Random rows: our way to the logits is the model's own, rows are apart, and no token sees a later one."""
    lengths = (5, 9, 5)
    ids = torch.randint(model.vocab, (sum(lengths),), generator=torch.Generator().manual_seed(0)).to(model.device)
    positions = torch.cat([torch.arange(length) for length in lengths]).to(model.device)
    rows = ids.split(lengths)
    try:
        alone = torch.cat([model.net(input_ids=row[None], use_cache=False).logits[0] for row in rows])
    except Exception as error:
        message = f"config.json: transformers {__version__} loads this model but cannot compute it: {error}"
        raise WorkerError("invalid_model", message) from error
    bound = _TOLERANCE[model.dtype] * float(alone.abs().max())
    try:
        found = model.logits(model.forward(ids, positions, lengths))
    except Exception as error:
        raise _unsupported(reason, f"its output cannot be computed apart from its layers: {error}") from error
    if not _near(found, alone, bound):
        raise _unsupported(reason, "its output computed apart from its layers differs from its own")
    other = rows[1].clone()
    other[-1] = (other[-1] + 1) % model.vocab
    changed = model.net(input_ids=other[None], use_cache=False).logits[0]
    if not _near(changed[:-1], alone[5 : 5 + 8], bound):
        raise _unsupported(reason, "a token sees later ones: it is no causal model")


def _near(one: Tensor, other: Tensor, bound: float) -> bool:
    return one.shape == other.shape and bool((one - other).abs().max() <= bound)


def _unsupported(reason: str, what: str) -> WorkerError:
    return WorkerError("unsupported_model", f"{reason}; and through transformers: {what}")
