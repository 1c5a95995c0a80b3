"""Checkpoints: staged on disk, hashed, uploaded under the attempt's prefix, and only then published.

Two folders are stored for each: what the customer gets (weights; what a model needs beside them, `companions.py`; a
card, `model_card.py`; a manifest, `manifest.py`), and the resume bundle (`resume.py`).
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from finery_gpu_workers import resume, storage
from finery_gpu_workers.companions import write_companions
from finery_gpu_workers.learner import Learner
from finery_gpu_workers.manifest import MANIFEST, MERGED, modules_in, parameters_in
from finery_gpu_workers.model_card import model_card
from finery_gpu_workers.resume import Snapshot
from finery_gpu_workers.start import Start
from finery_gpu_workers.work import Work


@dataclass(frozen=True)
class Facts:
    """Of one checkpoint, besides what all of an attempt have in common."""

    final: bool
    total_steps: int
    stop: list[int]
    """Token ids that end a turn."""
    evaluation: dict[str, Any] | None
    """The last one; at the checkpoint's own step, it is its validation loss (or reward)."""


@dataclass(frozen=True)
class Staged:
    """A checkpoint taken out of the learner: what training goes on to change is copied, the rest is written later."""

    folder: Path
    taken: Snapshot
    start: Start
    facts: Facts
    manifest: dict[str, Any]

    @property
    def customer(self) -> Path:
        """What the customer gets."""
        return self.folder / "checkpoint"


def stage(work: Work, learner: Learner, start: Start, taken: Snapshot, facts: Facts, common: dict[str, Any]) -> Staged:
    """In the loop, so it is short. `common` is the manifest's part that is the same for all of an attempt."""
    staged = Staged(work.folder / f"step-{taken.cursor.step:08d}", taken, start, facts, dict(common))
    folder = staged.customer
    folder.mkdir(parents=True)
    learner.save(folder, base_model=work.assignment.model_name, source=start.source)
    if facts.final and work.spec.export_merged and learner.kind == "adapter":
        learner.save_merged(folder / MERGED, start.source)
        staged.manifest["merged_parameters"] = parameters_in(folder / MERGED)
    staged.manifest.update(
        step=taken.cursor.step,
        total_steps=facts.total_steps,
        final=facts.final,
        trained_tokens=taken.cursor.trained_tokens,
        parameters=parameters_in(folder),
        adapted_modules=_adapted(folder, learner),
        metrics=taken.known.metrics,
        evaluation=facts.evaluation,
        validation_loss=_validation(facts, taken.cursor.step, "loss"),
        validation_reward=_validation(facts, taken.cursor.step, "reward"),
    )
    return staged


def _validation(facts: Facts, step: int, name: str) -> float | None:
    """None without an evaluation at this step that has it, or when it was not finite."""
    found: float | None = facts.evaluation.get(name) if facts.evaluation and facts.evaluation["step"] == step else None
    return found


def publish(work: Work, staged: Staged) -> None:
    """Write, hash, upload, then the fenced row; frees the disk."""
    step, manifest = staged.taken.cursor.step, staged.manifest
    prefix, resume_prefix = (
        f"{work.assignment.output_prefix}{kind}/step-{step:08d}/" for kind in ("checkpoints", "resume")
    )
    _complete(work, staged)
    files = storage.upload_all(work.store, staged.customer, prefix)
    manifest_json = json.dumps({**manifest, "files": [asdict(file) for file in files]}, indent=1)
    files.append(storage.upload_text(work.store, manifest_json, prefix, MANIFEST))
    work.control.publish(
        step=step,
        final=staged.facts.final,
        kind=manifest["kind"],
        validation_loss=manifest["validation_loss"],
        validation_reward=manifest["validation_reward"],
        prefix=prefix,
        files=[asdict(file) for file in files],
        manifest_json=manifest_json,
        resume_prefix=resume_prefix,
        resume_sha256=resume.upload(work, staged.taken, staged.folder / "resume", resume_prefix),
    )
    shutil.rmtree(staged.folder)


def _complete(work: Work, staged: Staged) -> None:
    """All that is not weights."""
    merged = staged.customer / MERGED
    for folder in (staged.customer, merged):
        if folder.exists():
            write_companions(staged.start.tokenizer, folder, staged.facts.stop)
    card = model_card(work, staged.manifest, merged=merged.exists())
    (staged.customer / "README.md").write_text(card, encoding="utf-8")


def _adapted(folder: Path, learner: Learner) -> int:
    """Modules in an exported adapter, which must be those that were trained; 0 for a whole model."""
    if learner.kind == "full":
        return 0
    found, expected = modules_in(folder), set(learner.trained.modules)
    if "model.embed_tokens" in expected:
        found -= {"lm_head"} - expected  # PEFT wants a tied matrix under both of its names
    if not found or found != expected:
        differing = sorted(found ^ expected)[:3]
        message = f"the adapter that was saved: expected {len(expected)} modules, found {len(found)}, as in {differing}"
        raise RuntimeError(message)
    return len(found)
