"""Where a job starts from: what is downloaded, what is checked, which tokenizer it has."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from finery.types.ids import new_id
from finery.types.methods import FullWeights, LoraAdapter, SftJobCreate
from finery_gpu_workers import storage
from finery_gpu_workers.data.prepared import sha256_file
from finery_gpu_workers.start import base_parts, open_start, start_adapter, tokenizer_folder, vocabulary
from finery_gpu_workers.storage import DigestError
from finery_gpu_workers.work import Work
from finery_protos.v1 import worker_pb2 as pb
from finery_testing.tiny import make_tiny_model


def stored(tmp_path: Path, name: str, files: dict[str, bytes], **manifest: Any) -> str:
    """A checkpoint in the store; its prefix."""
    folder = tmp_path / "store" / name
    for path, content in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)
    listed = [{"path": path, "sha256": sha256_file(folder / path)} for path in files]
    (folder / "manifest.json").write_text(json.dumps({"files": listed, **manifest}))
    return f"{name}/"


def work(tmp_path: Path, model: Path, *, start_prefix: str = "", base: Any = (), **spec: Any) -> Work:
    (tmp_path / "scratch").mkdir(exist_ok=True)
    return Work(
        control=None,  # type: ignore[arg-type]
        store=storage.open_store((tmp_path / "store").as_uri()),
        assignment=pb.Assignment(base=base, start_prefix=start_prefix),
        spec=SftJobCreate(method="sft", model="tiny", training_file=new_id("file", 0), **spec),
        model_folder=model,
        device="cpu",
        folder=tmp_path / "scratch",
        code_version="0",
    )


def part(kind: str, prefix: str) -> pb.BasePart:
    return pb.BasePart(checkpoint_id="ckpt_1", prefix=prefix, kind=kind)


MODEL = {"config.json": b"{}", "model-00001-of-00002.safetensors": b"1", "model-00002-of-00002.safetensors": b"2"}
MODEL |= {"model.safetensors.index.json": b"{}", "tokenizer.json": b"{}", "README.md": b"x"}
ADAPTER = {"adapter_config.json": b"{}", "adapter_model.safetensors": b"a", "tokenizer.json": b"{}"}
ADAPTER |= {"merged/model.safetensors": b"m", "merged/config.json": b"{}"}


def test_parts_are_downloaded_in_order_with_what_they_need(tmp_path: Path, tiny_folder: Path) -> None:
    base = [part("full", stored(tmp_path, "whole", MODEL)), part("merge", stored(tmp_path, "adapter", ADAPTER))]
    whole, adapter = base_parts(work(tmp_path, tiny_folder, base=base))
    assert (whole.kind, adapter.kind) == ("full", "merge")
    assert {path.name for path in whole.folder.iterdir()} == set(MODEL) - {"tokenizer.json", "README.md"}
    assert {path.name for path in adapter.folder.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}


def test_the_adapter_that_goes_on_is_downloaded(tmp_path: Path, tiny_folder: Path) -> None:
    folder = start_adapter(work(tmp_path, tiny_folder, start_prefix=stored(tmp_path, "adapter", ADAPTER)))
    assert folder is not None
    assert {path.name for path in folder.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    assert start_adapter(work(tmp_path, tiny_folder)) is None


def test_a_part_that_is_not_what_its_manifest_says_is_refused(tmp_path: Path, tiny_folder: Path) -> None:
    prefix = stored(tmp_path, "adapter", ADAPTER)
    (tmp_path / "store/adapter/adapter_model.safetensors").write_bytes(b"b")
    with pytest.raises(DigestError):
        base_parts(work(tmp_path, tiny_folder, base=[part("merge", prefix)]))


def test_a_part_without_the_files_it_needs_is_refused(tmp_path: Path, tiny_folder: Path) -> None:
    prefix = stored(tmp_path, "adapter", ADAPTER)
    with pytest.raises(RuntimeError, match="expected files in the manifest, found none"):
        base_parts(work(tmp_path, tiny_folder, base=[part("full", stored(tmp_path, "other", {"x": b""}))]))
    with pytest.raises(ValueError, match="expected full or merge, found 'half'"):
        base_parts(work(tmp_path, tiny_folder, base=[part("half", prefix)]))


def test_the_tokenizer_is_the_models_when_nothing_lies_on_it(tmp_path: Path, tiny_folder: Path) -> None:
    assert tokenizer_folder(work(tmp_path, tiny_folder)) == tiny_folder
    plain = vocabulary(work(tmp_path, tiny_folder))
    assert (plain.base, plain.rows, plain.new, plain.tied) == (261, 261, 0, True)


def test_the_tokenizer_is_that_of_the_last_part(tmp_path: Path, tiny_folder: Path) -> None:
    files = ADAPTER | {"tokenizer.json": (tiny_folder / "tokenizer.json").read_bytes(), "chat_template.jinja": b"last"}
    older = stored(tmp_path, "older", ADAPTER | {"chat_template.jinja": b"older"})
    newer = stored(tmp_path, "newer", files, vocab_size=270, tied=False)
    job = work(tmp_path, tiny_folder, base=[part("merge", older), part("merge", newer)])
    assert (tokenizer_folder(job) / "chat_template.jinja").read_text() == "last"
    rows = vocabulary(job)
    assert (rows.base, rows.rows, rows.tied) == (270, 270, False)


FULL = FullWeights(type="full")


def test_added_tokens_are_appended_once_and_nothing_else_changes(tmp_path: Path, tiny_folder: Path) -> None:
    tokens = ("<a>", "<|im_end|>", "<b>", "<a>")  # one is there, one is named twice
    job = work(tmp_path, tiny_folder, adapter=FULL, added_tokens=tokens)
    folder = tokenizer_folder(job)
    before, after = (Tokenizer.from_file(str(each / "tokenizer.json")) for each in (tiny_folder, folder))
    assert after.get_vocab() == before.get_vocab() | {"<a>": 261, "<b>": 262}
    assert after.encode("x<b><|im_end|>").ids == [ord("x"), 262, 260]
    assert (folder / "tokenizer_config.json").read_bytes() == (tiny_folder / "tokenizer_config.json").read_bytes()
    assert (vocabulary(job).base, vocabulary(job).rows) == (261, 263)
    assert tokenizer_folder(job) == folder
    assert not (tiny_folder / "added_tokens.json").exists()


def test_tokens_that_are_all_there_change_nothing(tmp_path: Path, tiny_folder: Path) -> None:
    """As for a job that goes on from one which added them; the adapter needs no embeddings."""
    job = work(tmp_path, tiny_folder, adapter=LoraAdapter(), added_tokens=("<|im_end|>",))
    assert tokenizer_folder(job) == tiny_folder
    assert vocabulary(job).new == 0


@pytest.mark.parametrize("kind", ["PreTrainedTokenizerFast", "Qwen2Tokenizer", "GPT2Tokenizer", "CohereTokenizer"])
def test_d05_added_tokens_are_tokens_for_transformers_whatever_class_it_takes(tmp_path: Path, kind: str) -> None:
    """Some of its classes know the added tokens only that tokenizer_config.json lists, as transformers 4 wrote them."""
    model = make_tiny_model(tmp_path / "model")
    known = Tokenizer.from_file(str(model / "tokenizer.json")).get_added_tokens_decoder()
    listed = {str(id_): {"content": token.content, "special": True} for id_, token in known.items()}
    file = model / "tokenizer_config.json"
    settings = json.loads(file.read_text()) | {"tokenizer_class": kind, "added_tokens_decoder": listed}
    file.write_text(json.dumps(settings))
    folder = tokenizer_folder(work(tmp_path, model, adapter=FULL, added_tokens=("<tool>", "</tool>")))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer("a<tool>b</tool><|im_end|>")["input_ids"] == [97, 261, 98, 262, 260]
    assert tokenizer.decode([97, 261, 98, 262], skip_special_tokens=True) == "ab"


def test_added_tokens_take_rows_that_the_embedding_already_has(tmp_path: Path) -> None:
    """Vocabularies are often padded: 261 ids, 264 rows."""
    model = make_tiny_model(tmp_path / "padded", vocab_size=264)
    for count, rows, reused in ((2, 264, (261, 262)), (3, 264, (261, 262, 263)), (5, 266, (261, 262, 263))):
        folder = tmp_path / str(count)
        folder.mkdir()
        shutil.rmtree(tmp_path / "scratch", ignore_errors=True)
        job = work(tmp_path, model, adapter=FULL, added_tokens=tuple(f"<{n}>" for n in range(count)))
        found = vocabulary(job)
        assert (found.base, found.rows, found.reused) == (264, rows, reused)


def test_an_ordinary_token_that_becomes_special_keeps_its_row(tmp_path: Path, tiny_folder: Path) -> None:
    job = work(tmp_path, tiny_folder, adapter=LoraAdapter(), added_tokens=("a",))
    found = vocabulary(job)
    assert (found.rows, found.reused) == (261, ())
    assert Tokenizer.from_file(str(tokenizer_folder(job) / "tokenizer.json")).encode("a").ids == [ord("a")]


def test_the_bases_digest_names_model_and_parts(tmp_path: Path, tiny_folder: Path) -> None:
    config = (tiny_folder / "config.json").read_bytes()
    whole = MODEL | {"config.json": config, "tokenizer.json": (tiny_folder / "tokenizer.json").read_bytes()}
    digests = set()
    for name, weights in (("one", b"1"), ("same", b"1"), ("other", b"3")):
        prefix = stored(
            tmp_path, name, whole | {"model-00001-of-00002.safetensors": weights}, vocab_size=261, tied=True
        )
        shutil.rmtree(tmp_path / "scratch", ignore_errors=True)
        start = open_start(work(tmp_path, tiny_folder, base=[part("full", prefix)]))
        digests.add(start.sha256)
        assert start.source == start.parts[0].folder
        assert start.chain == [{"checkpoint": "ckpt_1", "kind": "full", "vocab_size": 261}]
    shutil.rmtree(tmp_path / "scratch")
    assert len(digests | {open_start(work(tmp_path, tiny_folder)).sha256}) == 3
