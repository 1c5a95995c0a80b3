"""Where a job starts from: its tokenizer, the checkpoints that its frozen base is made of, the adapter that goes on.

Loads no torch: preparation needs the tokenizer too. Files of checkpoints are compared with the sha256 that the
checkpoint's manifest lists, and kept under the attempt's scratch folder.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from finery.types.methods import FullWeights
from finery_gpu_workers import storage
from finery_gpu_workers.data.tokens import add_tokens
from finery_gpu_workers.errors import WorkerError
from finery_gpu_workers.models.catalog import read_shape, weights_sha256
from finery_gpu_workers.models.parts import Part
from finery_gpu_workers.work import Work
from finery_protos.v1 import worker_pb2 as pb

MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"
TOKENIZER_FILES = (
    TOKENIZER,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
)
_SETTINGS = ("generation_config.json", "config.json")


def tokenizer_folder(work: Work) -> Path:
    """The folder whose tokenizer, chat template and generation settings are the job's.

    Those of the last part of the base, else of the model; with the spec's added tokens that were not there yet.
    """
    folder = work.folder / "tokenizer"
    if folder.exists():
        return folder
    source = _last_part_folder(work)
    added = _missing(source, work.spec.added_tokens)
    if not added:
        return source
    unfinished = work.folder / "tokenizer.unfinished"
    unfinished.mkdir(exist_ok=True)
    for name in (*TOKENIZER_FILES, *_SETTINGS):
        if (source / name).exists():
            shutil.copyfile(source / name, unfinished / name)
    _add_tokens(unfinished, added)
    unfinished.rename(folder)
    return folder


def base_parts(work: Work) -> list[Part]:
    """The checkpoints below the job's own weights, downloaded; they apply in order."""
    return [_part(work, part, work.folder / "base" / f"{n:02d}") for n, part in enumerate(work.assignment.base)]


def _part(work: Work, part: pb.BasePart, folder: Path) -> Part:
    if part.kind == "full":
        _fetch(work, part.prefix, folder, _is_model)
        return Part("full", folder)
    if part.kind == "merge":
        _fetch(work, part.prefix, folder, _is_adapter)
        return Part("merge", folder)
    raise ValueError(f"base part {part.checkpoint_id}: expected full or merge, found {part.kind!r}")


def start_adapter(work: Work) -> Path | None:
    """The adapter that goes on, downloaded; None for a job that starts a new one or trains all weights."""
    if not work.assignment.start_prefix:
        return None
    folder = work.folder / "start"
    _fetch(work, work.assignment.start_prefix, folder, _is_adapter)
    return folder


def start_settings(work: Work) -> Path | None:
    """A folder with the generation settings of the checkpoint whose adapter goes on: where its turns end."""
    if not work.assignment.start_prefix:
        return None
    folder = work.folder / "start-settings"
    _fetch(work, work.assignment.start_prefix, folder, lambda path: path == "generation_config.json")
    return folder


@dataclass(frozen=True)
class Vocabulary:
    """Rows of the embedding, without and with the tokens that the job adds."""

    base: int
    """Of the base as it is loaded."""
    rows: int
    """As it is trained: `base`, or more where an added token needs a row of its own."""
    tied: bool
    """The base's output matrix is its embedding."""
    reused: tuple[int, ...] = ()
    """Ids of added tokens whose rows the base already has: vocabularies are often padded."""

    @property
    def new(self) -> int:
        return self.rows - self.base


def vocabulary(work: Work) -> Vocabulary:
    """Raises WorkerError `added_tokens_untrained` where the adapter would leave the rows of added tokens untrained."""
    base, tied = _shape(work)
    before, after = (_tokenizer(f).get_vocab() for f in (_last_part_folder(work), tokenizer_folder(work)))
    ids = sorted(after[token] for token in after.keys() - before.keys())
    if not ids:
        return Vocabulary(base, base, tied)
    _check_trained(work, tied)
    return Vocabulary(base, max(base, ids[-1] + 1), tied, tuple(id_ for id_ in ids if id_ < base))


@dataclass(frozen=True)
class Start:
    """All of it, for a worker that trains."""

    tokenizer: Path
    """As `tokenizer_folder`."""
    parts: list[Part]
    source: Path
    """The folder whose config and weights come first: the last full part's, else the model's."""
    chain: list[dict[str, Any]]
    """The parts, as the manifest shows them."""
    vocabulary: Vocabulary
    sha256: str
    """Of the whole base."""


def open_start(work: Work) -> Start:
    """Raises WorkerError `added_tokens_untrained`, `base_changed`; storage.DigestError."""
    check_bases(work)
    rows = vocabulary(work)
    parts = base_parts(work)
    whole = [part.folder for part in parts if part.kind == "full"]
    return Start(
        tokenizer=tokenizer_folder(work),
        parts=parts,
        source=whole[-1] if whole else work.model_folder,
        chain=[_link(work, part) for part in work.assignment.base],
        vocabulary=rows,
        sha256=_base_sha256(work),
    )


def _link(work: Work, part: pb.BasePart) -> dict[str, Any]:
    content = _manifest(work, part.prefix)
    link: dict[str, Any] = {"checkpoint": part.checkpoint_id, "kind": part.kind}
    return link | {key: content[key] for key in ("base_vocab_size", "vocab_size") if key in content}


def check_bases(work: Work) -> None:
    """Raises WorkerError `base_changed` for an adapter that was not trained on what it would be put on now.

    Its shapes fit where only the numbers are other ones, and then nothing else would say so. The topmost adapter
    speaks for those below it, which were its base.
    """
    parts = work.assignment.base
    below, prefix = len(parts), work.assignment.start_prefix
    if not prefix and parts and parts[-1].kind == "merge":
        below, prefix = len(parts) - 1, parts[-1].prefix
    if not prefix:
        return
    expected, found = _manifest(work, prefix)["compute"]["base_sha256"], _base_sha256(work, below)
    if expected != found:
        raise WorkerError(
            "base_changed",
            f"from_checkpoint: expected the weights that its adapter was trained on (sha256 {expected}), found others "
            f"under the model's name (sha256 {found}); start from the model, or ask the operator for the weights of "
            "then",
            param="from_checkpoint",
        )


def _base_sha256(work: Work, count: int | None = None) -> str:
    """Of the weights that the first `count` parts leave (None: all): the last whole ones, and the merges on them."""
    parts = list(work.assignment.base)[:count]
    whole = max((number for number, part in enumerate(parts) if part.kind == "full"), default=-1)
    model = weights_sha256(work.model_folder) if whole < 0 else ""
    lines = [f"{model}\n"] if model else []
    for part in parts[max(whole, 0) :]:
        wanted = _is_model if part.kind == "full" else _is_adapter
        weights = [file for file in _files(work, part.prefix) if wanted(file["path"])]
        lines += [f"{part.kind} {file['sha256']}  {file['path']}\n" for file in weights]
    return model if model and len(lines) == 1 else hashlib.sha256("".join(lines).encode()).hexdigest()


def _shape(work: Work) -> tuple[int, bool]:
    """(rows of the embedding, tied) of the base as it is loaded."""
    content = _manifest(work, work.assignment.base[-1].prefix) if work.assignment.base else {}
    if "vocab_size" not in content:  # the first version of the manifest did not need it
        rows, tied = read_shape(work.model_folder)
        content = {"vocab_size": rows, "tied": tied}
    return int(content["vocab_size"]), bool(content["tied"])


def _check_trained(work: Work, tied: bool) -> None:
    adapter = work.spec.adapter
    if isinstance(adapter, FullWeights):
        return
    needed = {"embed_tokens"} if tied else {"embed_tokens", "lm_head"}
    if missing := sorted(needed - set(adapter.modules_to_save)):
        raise WorkerError(
            "added_tokens_untrained",
            f"added_tokens: expected {' and '.join(sorted(needed))} in adapter.modules_to_save, so that the new rows "
            f"are trained and stored, found {', '.join(adapter.modules_to_save) or 'none'}; add {', '.join(missing)}, "
            'or train all weights with {"type": "full"}',
            param="adapter.modules_to_save",
        )


def _last_part_folder(work: Work) -> Path:
    """Tokenizer and settings of the base; the model's own folder when nothing lies on it."""
    if not work.assignment.base:
        return work.model_folder
    folder = work.folder / "base-tokenizer"
    if not folder.exists():
        _fetch(work, work.assignment.base[-1].prefix, folder, lambda path: path in (*TOKENIZER_FILES, *_SETTINGS))
    return folder


def _is_model(path: str) -> bool:
    """Config and weights in a checkpoint's top folder; these may come in pieces with an index."""
    return path == "config.json" or ("/" not in path and path.startswith("model"))


def _is_adapter(path: str) -> bool:
    return path in ("adapter_config.json", "adapter_model.safetensors")


def _fetch(work: Work, prefix: str, folder: Path, wanted: Callable[[str], bool]) -> None:
    files = [(f["path"], f["sha256"]) for f in _files(work, prefix) if wanted(f["path"])]
    if not files:
        raise RuntimeError(f"{prefix}: expected files in the manifest, found none of those needed")
    storage.download_all(work.store, prefix, files, folder)


def _files(work: Work, prefix: str) -> list[dict[str, Any]]:
    files: list[dict[str, Any]] = _manifest(work, prefix)["files"]
    return files


def _manifest(work: Work, prefix: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(storage.read(work.store, prefix + MANIFEST))
    return content


def _missing(folder: Path, tokens: tuple[str, ...]) -> list[str]:
    """Those that are no special token yet, each once."""
    wanted = list(dict.fromkeys(tokens))
    if not wanted:
        return []
    special = {t.content for t in _tokenizer(folder).get_added_tokens_decoder().values() if t.special}
    return [token for token in wanted if token not in special]


def _tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / TOKENIZER))


def _add_tokens(folder: Path, tokens: list[str]) -> None:
    """Appends special tokens to tokenizer.json, and to the lists beside it where there are such."""
    tokenizer = _tokenizer(folder)
    add_tokens(tokenizer, tokens)
    tokenizer.save(str(folder / TOKENIZER))
    ids = {token: tokenizer.token_to_id(token) for token in tokens}
    listed = folder / "added_tokens.json"
    if listed.exists():
        _rewrite(listed, json.loads(listed.read_text("utf-8")) | ids)
    settings = folder / "tokenizer_config.json"
    content = json.loads(settings.read_text("utf-8")) if settings.exists() else {}
    if "added_tokens_decoder" in content:
        # Where there is this list, transformers' classes of many families know no token that it lacks.
        plain = dict.fromkeys(("lstrip", "normalized", "rstrip", "single_word"), False)
        content["added_tokens_decoder"] |= {
            str(id_): {"content": token, **plain, "special": True} for token, id_ in ids.items()
        }
        _rewrite(settings, content)


def _rewrite(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, ensure_ascii=False, indent=2), "utf-8")
