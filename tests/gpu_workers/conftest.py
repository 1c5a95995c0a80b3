"""Worker jobs: the real worker in this process, the tiny model, a control plane in memory."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import TypeAdapter

from finery.types.ids import new_id
from finery.types.methods import Adapter, JobCreate, LoraAdapter, Passes
from finery_gpu_workers import run
from finery_protos.v1 import worker_pb2 as pb
from finery_testing.control_plane import FakeControlPlane
from finery_testing.tiny import make_tiny_model

MakeJob = Callable[..., FakeControlPlane]
ADAPTER = LoraAdapter(rank=4, alpha=8.0)
_SPEC: TypeAdapter[JobCreate] = TypeAdapter(JobCreate)
TRAINING_FILE = new_id("file", 0)  # one for all, so that specs are equal


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


def chat_rows(count: int = 7) -> list[Any]:
    """Sums, in rows of different lengths."""
    return [
        {
            "messages": [
                {"role": "user", "content": f"What is {n} plus {n}?{' ' * (3 * n)}"},
                {"role": "assistant", "content": str(2 * n)},
            ]
        }
        for n in range(count)
    ]


def as_jsonl(rows: list[Any]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def trained(control: FakeControlPlane) -> FakeControlPlane:
    """Prepared, and trained to its end if that went well."""
    run.main(control.attempt(pb.ATTEMPT_KIND_PREPARE))
    if control.prepared is not None:
        run.main(control.attempt(pb.ATTEMPT_KIND_TRAIN))
    return control


def passes(control: FakeControlPlane) -> Passes:
    """The hyper-parameters of a job that passes over a file."""
    hyper = control.spec.hyperparameters
    assert isinstance(hyper, Passes)
    return hyper


def ended(control: FakeControlPlane) -> str:
    """The reason it ended with."""
    assert control.finished is not None, control.refused
    return control.finished.reason


def last_folder(control: FakeControlPlane) -> Path:
    """The last checkpoint, as a customer downloads it."""
    return control.store / control.checkpoints[-1].prefix


def last_manifest(control: FakeControlPlane) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(control.checkpoints[-1].manifest_json)
    return content


def evaluations(control: FakeControlPlane) -> dict[int, float]:
    """Validation loss by step."""
    return {step.step: step.evaluation.loss for step in control.steps if step.HasField("evaluation")}


def goes_on(first: FakeControlPlane) -> dict[str, Any]:
    """A job in which the adapter of `first` goes on."""
    prefix = first.checkpoints[-1].prefix
    return {"store": first.store, "job": f"{first.job}_next", "base": first.base, "start_prefix": prefix}


def stands_on(first: FakeControlPlane, kind: Literal["full", "merge"]) -> dict[str, Any]:
    """A job whose base is that of `first`, and its last checkpoint on top."""
    part = pb.BasePart(checkpoint_id=f"ckpt_{first.job}", prefix=first.checkpoints[-1].prefix, kind=kind)
    return {"store": first.store, "job": f"{first.job}_next", "base": (*first.base, part)}


def _spec(method: str, seed: int, adapter: Adapter, others: dict[str, Any], hyper: dict[str, Any]) -> JobCreate:
    defaults = {"learning_rate": 1e-2} | ({} if method == "rl" else {"batch_tokens": 128})
    given: dict[str, Any] = {} if method == "rl" else {"training_file": TRAINING_FILE}
    given |= {"method": method, "model": "tiny", "seed": seed, "adapter": adapter, "hyperparameters": defaults | hyper}
    return _SPEC.validate_python(given | others)


@pytest.fixture
def make_job(tmp_path: Path, tiny_folder: Path) -> Iterator[MakeJob]:
    """`make_job(rows, validation=rows, **hyperparameters)`, more than one if wanted; `spec` holds other fields.

    `method="dpo"` takes preference rows; `method="rl"` an environment in `spec`, and rows where its type is `prompts`.
    `onto=goes_on(first)` or `onto=stands_on(first, "full" | "merge")`: from the last checkpoint of another job.
    """
    made: list[FakeControlPlane] = []

    def make(
        rows: list[Any] | bytes | None = None,
        *,
        validation: list[Any] | None = None,
        model: Path | None = None,
        seed: int = 0,
        adapter: Adapter = ADAPTER,
        spec: dict[str, Any] | None = None,
        method: str = "sft",
        onto: dict[str, Any] | None = None,
        **hyper: Any,
    ) -> FakeControlPlane:
        if rows is None and method == "sft":
            rows = chat_rows()
        control = FakeControlPlane(
            spec=_spec(method, seed, adapter, spec or {}, hyper),
            model=model or tiny_folder,
            training=as_jsonl(rows) if isinstance(rows, list) else rows,
            validation=None if validation is None else as_jsonl(validation),
            **({"store": tmp_path / f"store-{len(made)}"} | (onto or {})),
        )
        made.append(control)
        return control

    yield make
    for control in made:
        control.close()
        assert not control.refused, control.refused
