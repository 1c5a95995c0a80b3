"""What a model folder may hold, and what is refused by name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from finery_gpu_workers.errors import WorkerError
from finery_gpu_workers.models import load
from finery_gpu_workers.models.config import read_config
from finery_gpu_workers.models.load import compute_dtype, load_model, stored_dtype
from finery_testing.tiny import make_tiny_model


def load_error(folder: Path) -> WorkerError:
    with pytest.raises(WorkerError) as caught:
        load_model(folder, device="cpu", dtype=torch.float32)
    return caught.value


def config_error(folder: Path) -> WorkerError:
    with pytest.raises(WorkerError) as caught:
        read_config(folder)
    return caught.value


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model_type", "gpt2"),
        ("hidden_act", "gelu"),
        ("sliding_window", 128),
        ("quantization_config", {"bits": 4}),
    ],
)
def test_an_architecture_that_we_would_compute_wrongly_is_refused_by_its_key(
    tmp_path: Path, key: str, value: object
) -> None:
    """By our decoder; whether transformers computes it then is another question."""
    folder = make_tiny_model(tmp_path / "m")
    edit_config(folder, **{key: value})
    error = config_error(folder)
    assert error.code == "unsupported_model"
    assert f"`{key}`" in error.message
    assert json.dumps(value) in error.message


def test_an_unknown_rope_is_refused(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "m", rope_parameters={"rope_type": "longrope", "rope_theta": 1e4, "factor": 2})
    error = config_error(folder)
    assert (error.code, "rope_type" in error.message) == ("unsupported_model", True)
    assert '"longrope"' in error.message


def test_h13_a_model_with_its_own_code_is_refused(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "m")
    canary = tmp_path / "canary"
    (folder / "evil.py").write_text(f"open({str(canary)!r}, 'w')")
    edit_config(folder, auto_map={"AutoModelForCausalLM": "evil.Model"})
    assert load_error(folder).code == "model_requires_remote_code"
    assert not canary.exists()


@pytest.mark.parametrize("name", ["pytorch_model.bin", "optimizer.pt", "rng_state.pth", "x.pkl"])
def test_h01_a_pickle_in_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    folder = make_tiny_model(tmp_path / "m")
    (folder / name).write_bytes(b"\x80\x04N.")
    error = load_error(folder)
    assert (error.code, name in error.message) == ("unsafe_checkpoint_file", True)


def test_h01_a_safetensors_file_that_is_something_else_is_refused(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "m")
    (folder / "model.safetensors").write_bytes(b"PK\x03\x04 not safetensors at all")
    assert load_error(folder).code == "invalid_model"


def test_a_missing_a_misshapen_and_an_unknown_tensor_are_named(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "m")
    good = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    for change, expected in (
        ({name: None}, name),
        ({name: torch.zeros(3, 3)}, name),
        ({"model.layers.0.self_attn.q_norm.weight": torch.zeros(8)}, "q_norm"),
    ):
        save_file({k: v for k, v in (good | change).items() if v is not None}, folder / "model.safetensors")
        error = load_error(folder)
        assert (error.code, expected in error.message) == ("invalid_model", True)


def test_a_copy_of_the_tied_matrix_is_dropped_and_another_one_is_refused(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "m")
    tensors = load_file(folder / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    save_file(tensors | {"lm_head.weight": embedding.clone()}, folder / "model.safetensors")
    assert load_model(folder, device="cpu", dtype=torch.float32).tied
    save_file(tensors | {"lm_head.weight": embedding + 1}, folder / "model.safetensors")
    error = load_error(folder)
    assert (error.code, "tie_word_embeddings" in error.message) == ("invalid_model", True)


def test_sharded_weights_load_like_one_file(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "m")
    whole = load_model(folder, device="cpu", dtype=torch.float32)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    files: dict[str, dict[str, torch.Tensor]] = {"a.safetensors": {}, "b.safetensors": {}}
    for n, (name, tensor) in enumerate(tensors.items()):
        files["ab"[n % 2] + ".safetensors"][name] = tensor
    weight_map = {name: file for file, part in files.items() for name in part}
    for file, part in files.items():
        save_file(part, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    sharded = load_model(folder, device="cpu", dtype=torch.float32)
    for one, other in zip(whole.projections(), sharded.projections(), strict=True):
        assert torch.equal(one.weight, other.weight)


def test_one_file_goes_before_an_index_as_in_transformers(tmp_path: Path) -> None:
    """An index of weights that were there before, whose pieces are still there."""
    folder, old = (make_tiny_model(tmp_path / name, seed=seed) for seed, name in enumerate(("new", "old")))
    shutil.copyfile(old / "model.safetensors", folder / "model-00001-of-00001.safetensors")
    weight_map = dict.fromkeys(load_file(old / "model.safetensors"), "model-00001-of-00001.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    expected = AutoModelForCausalLM.from_pretrained(folder).get_input_embeddings().weight
    weights = dict(load_model(folder, device="cpu", dtype=torch.float32).named_weights())
    assert torch.equal(weights["model.embed_tokens.weight"], expected)


def test_weights_keep_the_type_that_they_are_stored_in(tmp_path: Path) -> None:
    assert stored_dtype(make_tiny_model(tmp_path / "a")) == torch.float32
    assert stored_dtype(make_tiny_model(tmp_path / "b", dtype="bfloat16")) == torch.bfloat16


@pytest.mark.parametrize(
    ("cpuinfo", "expected"),
    [
        ("vendor_id : GenuineIntel\nflags : avx512_bf16 avx512_fp16", torch.float32),
        ("vendor_id : GenuineIntel\nflags : avx512_bf16 amx_bf16", torch.bfloat16),
        ("vendor_id : AuthenticAMD\nflags : avx512_bf16", torch.bfloat16),
        ("vendor_id : AuthenticAMD\nflags : avx2", torch.float32),
        (None, torch.float32),
    ],
)
def test_bf16_is_computed_in_float32_where_the_processor_is_slow_at_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cpuinfo: str | None, expected: torch.dtype
) -> None:
    path = tmp_path / "cpuinfo"
    if cpuinfo is not None:
        path.write_text(cpuinfo)
    monkeypatch.setattr(load, "_CPUINFO", path)
    assert compute_dtype(torch.bfloat16, "cpu") == expected
    assert compute_dtype(torch.float32, "cpu") == compute_dtype(torch.float64, "cpu") == torch.float32
    assert compute_dtype(torch.bfloat16, "cuda:0") == torch.bfloat16
