"""Tokenizer, chat template and generation settings of a checkpoint: those that were trained with."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from finery.types.methods import FullWeights, LoraAdapter
from finery_gpu_workers import run
from finery_gpu_workers.data import prepared
from finery_gpu_workers.errors import WorkerError
from finery_gpu_workers.learner import Learner
from finery_gpu_workers.models.load import load_model
from finery_protos.v1 import worker_pb2 as pb
from finery_testing.control_plane import FakeControlPlane
from finery_testing.tiny import BOS, CHAT_TEMPLATE, EOS, IM_END, PAD, make_tiny_model

from .cards import Spy, logits_of, run_card
from .conftest import MakeJob, chat_rows, ended, evaluations, goes_on, last_folder, last_manifest, stands_on, trained

TOKENS = ("<tool>", "</tool>")
TOOL, END_TOOL = 261, 262
IDS = [259, *b"user\n", TOOL, *b"7", END_TOOL, IM_END]
WITH_TOKENS: list[Any] = [
    {"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": f"<tool>{n}</tool>"}]}
    for n in range(6)
]


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def test_d15_tokenizer_and_special_tokens_are_the_bases(make_job: MakeJob, tiny_folder: Path) -> None:
    """One step. Only the template is added to the settings, where the base had it in a file of its own alone."""
    folder = last_folder(trained(make_job(max_steps=1)))
    assert (folder / "tokenizer.json").read_bytes() == (tiny_folder / "tokenizer.json").read_bytes()
    before, after = (json.loads((each / "tokenizer_config.json").read_text()) for each in (tiny_folder, folder))
    assert after == before | {"chat_template": CHAT_TEMPLATE}
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (BOS, EOS, PAD)


@pytest.mark.parametrize("where", ["file", "settings", "both", "settings by name", "file beside an older one"])
def test_d11_the_template_is_exported_to_both_places(make_job: MakeJob, tmp_path: Path, where: str) -> None:
    base = make_tiny_model(tmp_path / "base")
    settings = json.loads((base / "tokenizer_config.json").read_text())
    named = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": CHAT_TEMPLATE}]
    found = {"settings by name": named, "file beside an older one": "{{ old }}", "file": None}.get(where, CHAT_TEMPLATE)
    if found:
        settings["chat_template"] = found
    if where.startswith("settings"):
        (base / "chat_template.jinja").unlink()
    (base / "tokenizer_config.json").write_text(json.dumps(settings))
    rows = chat_rows(3)
    control = trained(make_job(rows, model=base, max_steps=1))
    assert ended(control) == "completed"
    folder, digest = last_folder(control), sha256(CHAT_TEMPLATE.encode())
    exported = json.loads((folder / "tokenizer_config.json").read_text())["chat_template"]
    in_settings = exported if isinstance(exported, str) else {e["name"]: e["template"] for e in exported}["default"]
    assert sha256((folder / "chat_template.jinja").read_bytes()) == sha256(in_settings.encode()) == digest
    assert control.prepared is not None
    trained_with = json.loads(control.prepared.statistics_json)["template_sha256"]
    assert last_manifest(control)["template_sha256"] == trained_with == digest
    check_rendering(control, folder, tmp_path, rows)


def check_rendering(control: FakeControlPlane, folder: Path, tmp_path: Path, rows: list[Any]) -> None:
    """transformers renders the conversations to the ids that were trained on; also where it reads one place alone."""
    assert control.prepared is not None
    data = prepared.load(control.store / control.prepared.prepared_prefix).train
    expected = [data.row(n).tokens.tolist() for n in range(3)]
    without_file = Path(shutil.copytree(folder, tmp_path / "without"))
    (without_file / "chat_template.jinja").unlink()
    for each in (folder, without_file):
        tokenizer = AutoTokenizer.from_pretrained(each)
        assert [tokenizer.apply_chat_template(r["messages"], return_dict=False) for r in rows] == expected


def test_d11_a_base_without_a_template_gets_none(make_job: MakeJob, tmp_path: Path) -> None:
    base = make_tiny_model(tmp_path / "base")
    (base / "chat_template.jinja").unlink()
    control = trained(make_job([{"text": "abc"}, {"text": "def"}], model=base, max_steps=1))
    assert ended(control) == "completed"
    folder = last_folder(control)
    assert not (folder / "chat_template.jinja").exists()
    assert (folder / "tokenizer_config.json").read_bytes() == (base / "tokenizer_config.json").read_bytes()
    assert last_manifest(control)["template_sha256"] is None


def test_d12_generation_ends_at_the_end_of_a_turn_too(make_job: MakeJob, tmp_path: Path) -> None:
    """Resolved from the data: the base's settings know only the end of the text."""
    base = make_tiny_model(tmp_path / "base")
    (base / "generation_config.json").write_text(json.dumps({"eos_token_id": EOS, "temperature": 0.7}))
    folder = last_folder(trained(make_job(max_steps=1, model=base)))
    settings = json.loads((folder / "generation_config.json").read_text())
    assert settings == {"eos_token_id": [EOS, IM_END], "temperature": 0.7}
    model = run_card(folder, base=base)["model"]
    assert model.generation_config.eos_token_id == [EOS, IM_END]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"eos_token_id": None}, {"eos_token_id": [IM_END]}),
        ({"eos_token_id": [IM_END, EOS]}, {"eos_token_id": [EOS, IM_END]}),
        # Without the file transformers takes them from config.json.
        (None, {"bos_token_id": BOS, "eos_token_id": [EOS, IM_END], "pad_token_id": PAD}),
    ],
)
def test_d12_generation_settings_of_any_base(
    make_job: MakeJob, tmp_path: Path, settings: dict[str, Any] | None, expected: dict[str, Any]
) -> None:
    base = make_tiny_model(tmp_path / "base")
    file = base / "generation_config.json"
    file.unlink()
    if settings is not None:
        file.write_text(json.dumps(settings))
    folder = last_folder(trained(make_job(max_steps=1, model=base)))
    assert json.loads((folder / "generation_config.json").read_text()) == expected


def adding(make_job: MakeJob, **job: Any) -> FakeControlPlane:
    return trained(make_job(WITH_TOKENS, spec={"added_tokens": TOKENS}, epochs=2, **job))


def lora(*saved: str) -> LoraAdapter:
    return LoraAdapter(rank=4, alpha=8.0, modules_to_save=saved)  # type: ignore[arg-type]


@pytest.mark.parametrize(("tied", "saved"), [(True, ("embed_tokens",)), (False, ("embed_tokens", "lm_head"))])
def test_d05_an_adapter_with_added_tokens_loads_by_its_card(
    make_job: MakeJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tied: bool, saved: tuple[str, ...]
) -> None:
    base = make_tiny_model(tmp_path / "base", tie_word_embeddings=tied)
    spy = Spy(monkeypatch, IDS)
    control = adding(make_job, adapter=lora(*saved), model=base)
    assert ended(control) == "completed"
    folder, content = last_folder(control), last_manifest(control)
    assert (content["base_vocab_size"], content["vocab_size"]) == (261, 263)
    names = run_card(folder, base=base)
    assert len(names["tokenizer"]) == 263
    assert names["tokenizer"].convert_tokens_to_ids(list(TOKENS)) == [TOOL, END_TOOL]
    assert torch.allclose(logits_of(names["model"], IDS), spy.logits, atol=1e-5)
    with pytest.raises(RuntimeError, match=r"263.*261"):
        PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder)
    model = load_model(base, device="cpu", dtype=torch.float32)
    learner = Learner.create(model, control.spec.adapter, control.spec.hyperparameters, seed=0)
    with pytest.raises(WorkerError, match=r"expected shape \(261, 32\), found \(263, 32\)"):
        learner.load_adapter(folder)


@pytest.mark.parametrize("how", ["all weights", "merged"])
def test_d05_a_whole_model_with_added_tokens_needs_no_recipe(
    make_job: MakeJob, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    spy = Spy(monkeypatch, IDS)
    full = how == "all weights"
    control = make_job(
        WITH_TOKENS,
        adapter=FullWeights(type="full") if full else lora("embed_tokens"),
        spec={"added_tokens": TOKENS, "export_merged": not full},
        epochs=2,
    )
    assert ended(trained(control)) == "completed"
    names = run_card(last_folder(control), 0 if full else 1)
    assert names["model"].get_input_embeddings().weight.shape == (263, 32)
    assert torch.allclose(logits_of(names["model"], IDS), spy.logits, atol=1e-5)
    assert len(names["tokenizer"]) == 263


def test_d05_added_tokens_go_on_and_are_merged(make_job: MakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next job has the tokens whether the adapter goes on, or is merged below another one."""
    first = adding(make_job, adapter=lora("embed_tokens"), validation=WITH_TOKENS)
    on = adding(make_job, adapter=lora("embed_tokens"), validation=WITH_TOKENS, onto=goes_on(first))
    assert evaluations(on)[0] == evaluations(first)[first.step]
    spy = Spy(monkeypatch, IDS)
    merged = trained(make_job(WITH_TOKENS, validation=WITH_TOKENS, onto=stands_on(first, "merge"), epochs=1))
    assert evaluations(merged)[0] == pytest.approx(evaluations(first)[first.step], rel=1e-5)
    content = last_manifest(merged)
    assert (content["base_vocab_size"], content["vocab_size"]) == (263, 263)
    tokenizers = [(last_folder(each) / "tokenizer.json").read_bytes() for each in (first, on, merged)]
    assert len(set(tokenizers)) == 1
    names = run_card(last_folder(merged), base=first.model, ckpt_job_test=last_folder(first))
    assert torch.allclose(logits_of(names["model"], IDS), spy.logits, atol=1e-4)


def test_rows_of_added_tokens_start_as_the_mean_of_all(make_job: MakeJob, tmp_path: Path) -> None:
    """Also where a padded vocabulary has rows for them: here one of the two."""
    base = make_tiny_model(tmp_path / "padded", vocab_size=262)
    control = adding(make_job, adapter=FullWeights(type="full"), model=base, learning_rate=1e-9)
    assert ended(control) == "completed"
    name = "model.embed_tokens.weight"
    before, after = (load_file(each / "model.safetensors")[name] for each in (base, last_folder(control)))
    assert after.shape == (263, 32)
    assert torch.allclose(after[261:], before.mean(dim=0).expand(2, -1), atol=1e-3)
    assert not torch.allclose(before[261], before.mean(dim=0), atol=1e-2)
    assert torch.allclose(after[:261], before[:261], atol=1e-6)


def test_d05_rows_of_added_tokens_that_would_not_be_stored_are_refused(make_job: MakeJob, tmp_path: Path) -> None:
    """Before an accelerator is taken; the untied model needs its output matrix too."""
    untied = make_tiny_model(tmp_path / "untied", tie_word_embeddings=False)
    for adapter, model, missing in (
        (lora(), None, "embed_tokens"),
        (lora("lm_head"), None, "embed_tokens"),
        (lora("embed_tokens"), untied, "lm_head"),
    ):
        control = make_job(WITH_TOKENS, adapter=adapter, model=model, spec={"added_tokens": TOKENS})
        trained_nothing(control, f"add {missing}")


def trained_nothing(control: FakeControlPlane, message: str) -> None:
    run.main(control.attempt(pb.ATTEMPT_KIND_PREPARE))
    assert ended(control) == "invalid_model"
    assert control.finished is not None
    assert control.finished.error is not None
    assert message in control.finished.error.message
    assert control.finished.error.code == "added_tokens_untrained"
    assert control.finished.error.param == "adapter.modules_to_save"
