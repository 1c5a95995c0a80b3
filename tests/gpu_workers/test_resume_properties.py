"""Interrupted = uninterrupted, whatever the job: rows in their order, metrics, usage and final files, bit for bit."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import grpc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from finery.types.methods import Adapter, FullWeights, LoraAdapter, SftHyperparameters, SftJobCreate
from finery_gpu_workers import run
from finery_gpu_workers.methods import passes_run, sft
from finery_protos.v1 import worker_pb2 as pb
from finery_testing.control_plane import FakeControlPlane
from finery_testing.tiny import make_tiny_model

from .conftest import (
    TRAINING_FILE,
    MakeJob,
    as_jsonl,
    chat_rows,
    ended,
    evaluations,
    last_manifest,
    stands_on,
    trained,
)
from .test_resume import outcome

ADAPTERS: list[Adapter] = [
    LoraAdapter(rank=2, alpha=4.0),
    LoraAdapter(rank=2, alpha=4.0, targets=("q_proj", "up_proj"), modules_to_save=("embed_tokens",)),
    LoraAdapter(rank=1, alpha=1.0, modules_to_save=("lm_head",)),
    FullWeights(type="full"),
]


@contextmanager
def recorded() -> Iterator[list[list[int]]]:
    """The rows of every update that is trained, in order."""
    updates: list[list[int]] = []
    update = passes_run.Run.update

    def recording(self: passes_run.Run, step: int, before: Any) -> Any:
        updates.append(self.plan.update(step).rows.tolist())
        micro: list[int] = []
        batch = sft.packed_batch

        def packing(rows: Any, chosen: Any) -> Any:
            micro.extend(chosen.tolist())
            return batch(rows, chosen)

        with mock.patch.object(sft, "packed_batch", packing):
            result = update(self, step, before)
        assert micro == updates[-1]  # what the learner was given
        return result

    with mock.patch.object(passes_run.Run, "update", recording):
        yield updates


def job(folder: Path, tiny: Path, adapter: Adapter, rows: int, hyper: dict[str, Any], seed: int) -> FakeControlPlane:
    spec = SftJobCreate(
        method="sft", model="tiny", training_file=TRAINING_FILE, seed=seed, adapter=adapter,
        hyperparameters=SftHyperparameters(learning_rate=1e-2, **hyper),
    )  # fmt: skip
    training, validation = as_jsonl(chat_rows(rows)), as_jsonl(chat_rows(2))
    return FakeControlPlane(store=folder, spec=spec, model=tiny, training=training, validation=validation)


def prepared_alike(control: FakeControlPlane, other: FakeControlPlane) -> None:
    """The same data, without another child that renders it."""
    assert other.prepared is not None
    control.prepared = other.prepared
    prefix = other.prepared.prepared_prefix
    shutil.copytree(other.store / prefix, control.store / prefix)


def killed_at(step: int) -> Any:
    """The commit of this step never arrives: another attempt has the job."""

    def kill(name: str, request: Any) -> grpc.StatusCode | None:
        late = name == "CommitSteps" and request.steps[-1].step >= step
        return grpc.StatusCode.ABORTED if late else None

    return kill


hyperparameters = st.fixed_dictionaries(
    {
        "epochs": st.integers(1, 3),
        "batch_tokens": st.integers(60, 260),
        "micro_batch_tokens": st.integers(16, 200),
        "checkpoint_every": st.integers(1, 4),
        "eval_every": st.none() | st.integers(1, 3),
        "schedule": st.sampled_from(["linear", "cosine", "constant", "wsd"]),
        "weight_decay": st.sampled_from([0.0, 0.1]),
        "max_grad_norm": st.sampled_from([None, 0.5]),
        "early_stopping_patience": st.none() | st.integers(1, 3),
        "early_stopping_min_delta": st.sampled_from([0.0, 0.2]),
    }
)


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    hyper=hyperparameters,
    rows=st.integers(1, 8),
    seed=st.integers(0, 3),
    adapter=st.sampled_from(ADAPTERS),
    data=st.data(),
)
def test_d01_a_job_killed_after_any_step_ends_as_if_it_had_not_been(
    tiny_folder: Path, hyper: dict[str, Any], rows: int, seed: int, adapter: Adapter, data: st.DataObject
) -> None:
    with TemporaryDirectory() as folder:
        straight, control = (job(Path(folder) / n, tiny_folder, adapter, rows, hyper, seed) for n in ("a", "b"))
        try:
            with recorded() as expected:
                trained(straight)
            assert ended(straight) in ("completed", "stopped_early")
            victim = data.draw(st.integers(1, straight.step), label="killed at")
            prepared_alike(control, straight)
            with recorded() as found:
                control.hook = killed_at(victim)
                run.main(control.attempt(pb.ATTEMPT_KIND_TRAIN))
                assert control.finished is None
                control.hook = lambda _name, _request: None
                resumed = control.checkpoints[-1].step if control.checkpoints else 0
                del found[resumed:]  # done, but lost with the worker
                run.main(control.attempt(pb.ATTEMPT_KIND_TRAIN))
            assert found == expected
            assert ended(control) == ended(straight)
            assert outcome(control) == outcome(straight)
            assert [*control.refused, *straight.refused] == []
        finally:
            straight.close()
            control.close()


def test_d01_resumed_inside_the_second_epoch(make_job: MakeJob) -> None:
    """10 rows, 2 to a batch, 3 epochs, stopped after step 7: steps 8 to 15 hold the rows that they always would."""
    rows = [
        {"messages": [{"role": "user", "content": f"{n}"}, {"role": "assistant", "content": "ok"}]} for n in range(10)
    ]
    # 10 + 15 tokens by F-CHAT, of which "hi" is now one character.
    hyper = {"epochs": 3, "batch_tokens": 48, "checkpoint_every": 7}
    straight, control = make_job(rows, **hyper), make_job(rows, **hyper)
    with recorded() as expected:
        trained(straight)
    assert [len(update) for update in expected] == [2] * 15
    for epoch in range(3):
        seen = Counter(row for update in expected[5 * epoch : 5 * epoch + 5] for row in update)
        assert seen == Counter(range(10))
    assert expected[:5] != expected[5:10] != expected[10:]
    run.main(control.attempt(pb.ATTEMPT_KIND_PREPARE))
    control.hook = killed_at(8)
    run.main(control.attempt(pb.ATTEMPT_KIND_TRAIN))
    assert [checkpoint.step for checkpoint in control.checkpoints] == [7]
    control.hook = lambda _name, _request: None
    with recorded() as found:
        run.main(control.attempt(pb.ATTEMPT_KIND_TRAIN))
    assert found == expected[7:]
    assert outcome(control) == outcome(straight)


def test_resume_is_exact_for_added_tokens_and_a_merged_export(make_job: MakeJob) -> None:
    spec = {"added_tokens": ("<tool>",), "export_merged": True}
    adapter = LoraAdapter(rank=2, alpha=4.0, modules_to_save=("embed_tokens",))
    rows = [*chat_rows(4), {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "<tool>"}]}]
    straight, control = (
        make_job(rows, adapter=adapter, spec=spec, validation=chat_rows(2), epochs=2, checkpoint_every=2)
        for _ in range(2)
    )
    trained(straight)
    run.main(control.attempt(pb.ATTEMPT_KIND_PREPARE))
    control.hook = killed_at(5)
    run.main(control.attempt(pb.ATTEMPT_KIND_TRAIN))
    control.hook = lambda _name, _request: None
    run.main(control.attempt(pb.ATTEMPT_KIND_TRAIN))
    assert ended(control) == "completed"
    assert outcome(control) == outcome(straight)


def test_resume_is_exact_for_all_weights_in_bf16(
    make_job: MakeJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rounded weights alone would not do: masters are float32. The next job starts from the rounded ones."""
    monkeypatch.setattr("finery_gpu_workers.models.load._multiplies_bf16_fast", lambda _: True)
    hyper = {"epochs": 2, "checkpoint_every": 2, "learning_rate": 1e-3}
    job = {"model": make_tiny_model(tmp_path / "bf16", dtype="bfloat16"), "adapter": FullWeights(type="full")}
    straight, control = (make_job(validation=chat_rows(2), **job, **hyper) for _ in range(2))
    trained(straight)
    run.main(control.attempt(pb.ATTEMPT_KIND_PREPARE))
    control.hook = killed_at(5)
    run.main(control.attempt(pb.ATTEMPT_KIND_TRAIN))
    assert control.checkpoints[-1].step == 4
    control.hook = lambda _name, _request: None
    run.main(control.attempt(pb.ATTEMPT_KIND_TRAIN))
    assert outcome(control) == outcome(straight)
    assert last_manifest(control)["compute"]["dtype"] == "bfloat16"
    after = trained(make_job(validation=chat_rows(2), **job, onto=stands_on(straight, "full"), max_steps=1))
    assert evaluations(after)[0] == evaluations(straight)[straight.step]


def test_a_bundle_of_another_shape_is_refused(make_job: MakeJob) -> None:
    """The job's own spec never changes; this is what would say so."""
    control = make_job(epochs=2, checkpoint_every=2)
    run.main(control.attempt(pb.ATTEMPT_KIND_PREPARE))
    control.hook = killed_at(3)
    run.main(control.attempt(pb.ATTEMPT_KIND_TRAIN))
    control.hook = lambda _name, _request: None
    control.spec = control.spec.model_copy(update={"adapter": LoraAdapter(rank=2, alpha=4.0)})
    run.main(control.attempt(pb.ATTEMPT_KIND_TRAIN))
    assert ended(control) == "platform_fault"
    assert [step.step for step in control.steps if step.step > 2] == []
