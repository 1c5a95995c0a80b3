"""What an adapter asks for, held against what the model has."""

from __future__ import annotations

from finery.types.methods import EmbeddingName, LoraAdapter
from finery_gpu_workers.errors import WorkerError
from finery_gpu_workers.models.interface import Model

SAVED: dict[EmbeddingName, str] = {"embed_tokens": "model.embed_tokens.weight", "lm_head": "lm_head.weight"}
"""Names of the matrices of `modules_to_save` in transformers."""


def check_targets(model: Model, adapter: LoraAdapter) -> None:
    """Raises WorkerError `unknown_target` for a layer or matrix that the model lacks, naming what it has."""
    has = {name.rsplit(".", 1)[-1] for projection in model.projections() for name in projection.names}
    if not has:
        raise _unknown("this model has no linear layer in its blocks; train it whole (`full`)", "adapter")
    wanted = has if adapter.targets == "all-linear" else set(adapter.targets)
    if missing := sorted(wanted - has):
        found = f"expected layers that this model has ({', '.join(sorted(has))})"
        raise _unknown(f"{found}, found `{missing[0]}`; name others, or `all-linear`", "adapter.targets")
    matrices = {name: weight for name, weight in model.named_weights() if weight.ndim > 1}
    for one in adapter.modules_to_save:
        # The output matrix of a tied model gets its name when it becomes one of its own.
        if SAVED[one] not in matrices and not (one == "lm_head" and model.tied):
            own = [name for name, weight in matrices.items() if len(weight) == model.vocab]
            found = f"expected `{SAVED[one]}`, found {' and '.join(own)} in this model"
            raise _unknown(f"{one}: {found}; train it whole (`full`)", "adapter.modules_to_save")


def _unknown(message: str, param: str) -> WorkerError:
    return WorkerError("unknown_target", message, param=param)
