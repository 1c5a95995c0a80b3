"""Rows that a model would compute otherwise than its makers meant fail the job while it is validated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from finery_gpu_workers import run
from finery_gpu_workers.models.catalog import longest_row
from finery_protos.v1 import worker_pb2 as pb
from finery_testing.tiny import make_tiny_model

from .conftest import MakeJob

DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}


def gpt2_in(folder: Path) -> Path:
    """With 64 learned positions, and our tokenizer."""
    make_tiny_model(folder)
    sizes = {"vocab_size": 261, "n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 64}
    AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", **sizes)).save_pretrained(folder)
    return folder


def tiny_in(folder: Path, **config: Any) -> Path:
    return make_tiny_model(folder, max_position_embeddings=64, **config)


def test_how_long_a_row_may_be(tmp_path: Path) -> None:
    assert longest_row(tiny_in(tmp_path / "plain")) is None
    assert longest_row(tiny_in(tmp_path / "dynamic", rope_parameters=DYNAMIC)) == 64
    assert longest_row(tiny_in(tmp_path / "window", model_type="mistral", sliding_window=80)) == 80
    assert longest_row(gpt2_in(tmp_path / "gpt2")) == 64


@pytest.mark.parametrize(
    ("kind", "extra", "reason"), [("dynamic", 0, None), ("dynamic", 20, "invalid_model"), ("gpt2", 20, "invalid_model")]
)
def test_a_row_that_is_too_long_for_the_model_ends_the_preparation(
    make_job: MakeJob, tmp_path: Path, kind: str, extra: int, reason: str | None
) -> None:
    model = gpt2_in(tmp_path / kind) if kind == "gpt2" else tiny_in(tmp_path / kind, rope_parameters=DYNAMIC)
    control = make_job([{"text": "x" * 40}, {"text": "y" * (50 + extra)}], model=model)
    run.main(control.attempt(pb.ATTEMPT_KIND_PREPARE))
    if reason is None:
        assert control.finished is None
    else:
        assert control.finished is not None
        assert control.finished.error is not None
        assert (control.finished.reason, control.finished.error.code) == (reason, "row_too_long_for_model")
        assert control.finished.error.param == "hyperparameters.max_length"
        assert "at most 64 tokens" in control.finished.error.message
