"""What a worker can tell the customer: a stable code and a sentence that says what to do.

Codes of `finery_gpu_workers.models` and `start`. Another choice of the customer's mends these:
    unsupported_model             neither our decoder nor transformers computes it, by the key or part that is named
    model_requires_remote_code    the folder brings Python code, which is never run
    unknown_target                the adapter names layers or matrices that the model lacks
    unsupported_adapter           a variant of LoRA that would be applied wrongly
    base_changed                  the catalogue's model is no longer the one that a checkpoint's adapter was trained on
    row_too_long_for_model        beyond a sliding window, a dynamic rope or learned positions
The operator's catalogue mends these:
    model_not_found, model_source_unavailable, invalid_model, unsafe_checkpoint_file
    Where a job meets one of these but `model_source_unavailable` while it fetches its model, it fails at once with
    `model_not_found` and a sentence that names no path; the worker's log has the first error.
Codes of environments:
    invalid_environment           the customer mends it: a grader, a task, a reward file that cannot be used as given
    sandbox_unavailable           the operator mends it: customers' code needs a sandbox that this machine cannot give
    rewards_failed                too many rollouts of a step got no reward
A checkpoint of ours that does not fit its base, which is a fault of ours:
    invalid_adapter, adapter_mismatch
"""

from __future__ import annotations

from typing import Any


class WorkerError(Exception):
    """Ends the job; `code` is stable, `message` says what was expected, what was found, where, what to do."""

    def __init__(
        self, code: str, message: str, *, param: str | None = None, details: list[dict[str, Any]] | None = None
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param
        self.details = details

    def __str__(self) -> str:
        return f"{self.code}: {self.message}"
