"""DPO jobs: the real worker, a tiny model, numbers worked out by hand or by transformers and PEFT."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from safetensors.numpy import load_file
from safetensors.torch import load_file as load_tensors
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from finery.types.jobs import Intent
from finery.types.methods import FullWeights, LoraAdapter
from finery_gpu_workers import run
from finery_gpu_workers.data.preference import Pairs
from finery_gpu_workers.data.prepared import load
from finery_gpu_workers.learner import Learner
from finery_gpu_workers.report import ControlPlane
from finery_protos.v1 import worker_pb2 as pb
from finery_testing.control_plane import FakeControlPlane
from finery_testing.tiny import IM_END, make_tiny_model

from .conftest import MakeJob, ended, evaluations, goes_on, last_folder, last_manifest, stands_on, trained
from .test_sft_fallback import GEMMA, make

LN2 = math.log(2)
FULL = FullWeights(type="full")


def pair_rows(count: int = 12) -> list[Any]:
    """Sums with the right answer and a talkative wrong one."""
    return [
        {
            "messages": [{"role": "user", "content": f"What is {n} plus {n}?{' ' * (2 * n)}"}],
            "chosen": str(2 * n),
            "rejected": "I do not know" + "!" * (n % 5),
        }
        for n in range(count)
    ]


def prepared(control: FakeControlPlane) -> Path:
    assert control.prepared is not None
    return control.store / control.prepared.prepared_prefix


def reference(control: FakeControlPlane) -> dict[str, Any]:
    """The one object of reference log-probs that the job's attempts have stored."""
    (path,) = control.store.glob("**/reference/*.safetensors")
    found: dict[str, Any] = load_file(path)
    return found


def peer_log_probs(net: Any, pairs: Pairs, n: int) -> tuple[Tensor, Tensor]:
    """Log-probs of the tokens of both answers, from transformers, one unshared row at a time."""
    pair = pairs.pair(n)
    found = []
    for answer in (pair.chosen, pair.rejected):
        ids = torch.from_numpy(np.concatenate((pair.prompt, answer)).astype(np.int64))
        logits = net(ids[None]).logits[0, :-1]
        picked = logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        found.append(picked[-len(answer) :])
    return found[0], found[1]


def test_a_job_learns_what_is_preferred_and_says_so(make_job: MakeJob) -> None:
    rows = pair_rows()
    control = trained(make_job(rows, method="dpo", validation=rows[:4], max_steps=12, checkpoint_every=6))
    assert ended(control) == "completed"
    start, last = (next(s for s in control.steps if s.step == n) for n in (0, 12))
    found = dict(start.evaluation.metrics)
    assert start.evaluation.loss == pytest.approx(LN2, abs=1e-6)
    zero = {name: found[name] for name in ("margin", "chosen_reward", "rejected_reward", "kl")}
    assert zero == dict.fromkeys(zero, 0.0)
    assert found["accuracy"] == 0.5, "of equals"
    found = dict(last.evaluation.metrics)
    assert last.evaluation.loss < 0.5 * LN2
    assert found["accuracy"] == 1.0
    assert found["margin"] == pytest.approx(found["chosen_reward"] - found["rejected_reward"])
    assert found["rejected_logp"] < start.evaluation.metrics["rejected_logp"]
    assert found["kl"] > 0
    assert last.metrics.keys() >= {*found, "loss", "grad_norm", "learning_rate", "trained_tokens", "tokens"}
    # Both answers and the tokens that end them; nothing of prompts.
    answers = sum(len(row[side]) + 1 for row in rows[:4] for side in ("chosen", "rejected"))
    assert last.evaluation.tokens == answers
    usage = {u.unit: (u.sku, u.quantity) for s in control.steps for u in s.usage}
    assert usage["eval:0"] == ("eval.dpo", answers)
    assert usage["step:1"] == ("train.dpo", int(control.steps[1].metrics["trained_tokens"]))
    content = last_manifest(control)
    assert (content["loss"], content["reference"]) == ({"name": "sigmoid", "beta": 0.1}, "tiny")
    card = (last_folder(control) / "README.md").read_text()
    assert "`dpo`" in card
    assert "sigmoid" in card
    assert "reference: `tiny`" in card


@pytest.mark.parametrize("start", ["adapter", "merge", "full"])
def test_b08_the_reference_is_the_checkpoint_that_the_job_goes_on_from(make_job: MakeJob, start: str) -> None:
    rows, whole = pair_rows(6), start == "full"
    sft = [{"messages": [*row["messages"], {"role": "assistant", "content": row["chosen"]}]} for row in rows]
    first = trained(make_job(sft, adapter=FULL if whole else LoraAdapter(rank=4, alpha=8.0), epochs=4))
    assert ended(first) == "completed"
    onto = goes_on(first) if start == "adapter" else stands_on(first, "full" if whole else "merge")
    control = trained(make_job(rows, method="dpo", onto=onto, validation=rows[:2], epochs=1))
    assert ended(control) == "completed"
    assert evaluations(control)[0] == pytest.approx(LN2, abs=1e-6)
    step = next(s for s in control.steps if s.step == 1)
    assert step.metrics["loss"] == pytest.approx(LN2, abs=1e-6)
    assert [step.metrics[name] for name in ("margin", "kl", "accuracy")] == [0.0, 0.0, 0.5]
    # And it is what PEFT computes of that checkpoint, not the base.
    base = AutoModelForCausalLM.from_pretrained(last_folder(first) if whole else first.model, dtype=torch.float32)
    net = base if whole else peft.PeftModel.from_pretrained(base, last_folder(first))
    pairs, values = Pairs(load(prepared(control)).train), reference(control)["train"]
    with torch.no_grad():
        expected = torch.cat([torch.cat(peer_log_probs(net, pairs, n)) for n in range(len(pairs))])
        plain = AutoModelForCausalLM.from_pretrained(first.model, dtype=torch.float32)
        other = torch.cat(peer_log_probs(plain, pairs, 0))
    torch.testing.assert_close(torch.from_numpy(values), expected, rtol=1e-4, atol=1e-4)
    assert float((other - expected[: len(other)]).abs().max()) > 0.05, "an SFT that changed nothing would prove little"


def test_loss_and_gradient_are_those_of_transformers_and_peft(make_job: MakeJob) -> None:
    """Two steps: in the first the policy is the reference, in the second it is not."""
    hyper = {"beta": 0.3, "label_smoothing": 0.1, "sft_weight": 0.2, "max_grad_norm": None, "schedule": "constant"}
    rows = pair_rows(8)
    control = trained(make_job(rows, method="dpo", batch_tokens=4096, warmup_ratio=0.0, max_steps=2, **hyper))
    one = make_job(rows, method="dpo", batch_tokens=4096, warmup_ratio=0.0, max_steps=1, **hyper)
    assert ended(trained(one)) == "completed"
    pairs = Pairs(load(prepared(control)).train)
    net = AutoModelForCausalLM.from_pretrained(control.model, dtype=torch.float32)
    with torch.no_grad():
        start = [[side.sum() for side in peer_log_probs(net, pairs, n)] for n in range(len(pairs))]
    peer = peft.PeftModel.from_pretrained(net, last_folder(one), is_trainable=True)
    chosen_tokens, total = sum(len(pairs.pair(n).chosen) for n in range(len(pairs))), 0.0
    for n, (chosen_start, rejected_start) in enumerate(start):
        chosen, rejected = (side.sum() for side in peer_log_probs(peer, pairs, n))
        margin = 0.3 * ((chosen - chosen_start) - (rejected - rejected_start))
        preferred = 0.9 * torch.nn.functional.softplus(-margin) + 0.1 * torch.nn.functional.softplus(margin)
        loss = preferred / len(pairs) - 0.2 * chosen / chosen_tokens
        loss.backward()
        total += float(loss.detach())
    norm = torch.cat([p.grad.flatten() for p in peer.parameters() if p.grad is not None]).norm()
    step = control.steps[1]
    assert step.metrics["loss"] == pytest.approx(total, rel=1e-5)
    assert step.metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-4)


@pytest.fixture
def even_folder(tmp_path: Path) -> Path:
    """Every token is equally likely, whatever is before it: an output matrix of zeros."""
    folder = make_tiny_model(tmp_path / "even", tie_word_embeddings=False)
    weights = load_tensors(folder / "model.safetensors")
    weights["lm_head.weight"].zero_()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


LN261 = math.log(261)


@pytest.mark.parametrize(
    ("hyper", "loss", "reward"),
    [
        ({"loss": "sigmoid"}, LN2, 0.0),
        ({"loss": "sigmoid", "sft_weight": 0.25}, LN2 + 0.25 * LN261, 0.0),
        ({"loss": "ipo", "beta": 0.2}, 2.5**2, 0.0),
        ({"loss": "apo_zero"}, 1.0, 0.0),
        # -log σ(-0.5)
        ({"loss": "simpo"}, math.log(1 + math.exp(0.5)), -2.0 * LN261),
        ({"loss": "orpo"}, LN261 + 0.1 * LN2, -0.1 * LN261),
    ],
    ids=lambda value: value["loss"] if isinstance(value, dict) else "",
)
def test_before_the_first_step_numbers_are_those_worked_out_by_hand(
    make_job: MakeJob, even_folder: Path, hyper: dict[str, Any], loss: float, reward: float, monkeypatch: Any
) -> None:
    counted: list[int] = []
    log_probs = Learner.log_probs

    def counting(self: Learner, batch: Any, temperature: float = 1.0) -> Tensor:
        counted.append(batch.scored)
        return log_probs(self, batch, temperature)

    monkeypatch.setattr(Learner, "log_probs", counting)
    # 4 answers of 2 and 3 bytes and the token that ends a turn: 3 and 4 tokens.
    rows = [{"prompt": f"{n}?", "chosen": "ab", "rejected": "abc"} for n in range(4)]
    adapter = LoraAdapter(rank=2, modules_to_save=("lm_head",))
    job = make_job(rows, method="dpo", model=even_folder, adapter=adapter, max_steps=2, batch_tokens=4096, **hyper)
    control = trained(job)
    assert ended(control) == "completed"
    step = control.steps[0].metrics
    assert step["loss"] == pytest.approx(loss, rel=1e-6)
    assert (step["chosen_logp"], step["rejected_logp"]) == pytest.approx((-3 * LN261, -4 * LN261), rel=1e-6)
    assert (step["chosen_reward"], step["rejected_reward"]) == pytest.approx((reward, reward), rel=1e-6)
    assert (step["margin"], step["trained_tokens"]) == (0.0, 4 * 7)
    free = hyper["loss"] in ("simpo", "orpo")
    assert sum(counted) == (0 if free else 4 * 7), "scored without training: the reference, each pair once"
    assert ("kl" in step) != free
    assert last_manifest(control)["reference"] == (None if free else "tiny")


def test_micro_batches_change_nothing_and_never_split_a_pair(make_job: MakeJob) -> None:
    rows, found = pair_rows(10), []
    for limit in (None, 16, 200):
        job = {"micro_batch_tokens": limit, "batch_tokens": 500, "sft_weight": 0.5, "max_grad_norm": None}
        control = trained(make_job(rows, method="dpo", max_steps=3, **job))
        assert ended(control) == "completed"
        names = ("loss", "margin", "kl", "chosen_logp", "grad_norm")
        found.append([[step.metrics[name] for name in names] for step in control.steps])
        assert len({step.metrics["tokens"] for step in control.steps}) > 1
    for other in found[1:]:
        assert np.allclose(other[0], found[0][0], rtol=1e-6, atol=1e-6)
        assert np.allclose(other, found[0], rtol=1e-4, atol=1e-5)


def test_the_token_that_ends_the_answer_is_trained(make_job: MakeJob) -> None:
    control = trained(make_job(pair_rows(4), method="dpo", max_steps=1))
    pairs = Pairs(load(prepared(control)).train)
    assert all(pairs.pair(n).chosen[-1] == pairs.pair(n).rejected[-1] == IM_END for n in range(len(pairs)))
    assert all(pairs.pair(n).chosen_mask[-1] == 1 for n in range(len(pairs)))


@pytest.mark.parametrize(
    "adapter", [FULL, LoraAdapter(rank=2, modules_to_save=("embed_tokens",))], ids=["full", "saved"]
)
def test_all_weights_and_added_tokens(make_job: MakeJob, adapter: Any) -> None:
    rows = pair_rows(6)
    spec = {"added_tokens": ["<|sum|>"], "export_merged": adapter is not FULL}
    job = {"validation": rows[:2], "max_steps": 6, "learning_rate": 3e-3, "early_stopping_patience": 5}
    control = trained(make_job(rows, method="dpo", adapter=adapter, spec=spec, **job))
    assert ended(control) == "completed"
    assert evaluations(control)[0] == pytest.approx(LN2, abs=1e-6)
    assert evaluations(control)[6] < LN2 - 0.05
    assert ((last_folder(control) / "merged").exists()) == (adapter is not FULL)


@pytest.mark.parametrize("other", ["bf16", "gemma2"])
def test_before_the_first_step_policy_and_reference_agree_to_the_last_bit(
    make_job: MakeJob, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: str
) -> None:
    """In several micro-batches, whose shapes change how sums of bf16 are rounded; and on a model of transformers'."""
    if other == "bf16":
        monkeypatch.setattr("finery_gpu_workers.models.load._multiplies_bf16_fast", lambda _: True)
        model = make_tiny_model(tmp_path / "bf16", dtype="bfloat16")
    else:
        model = make(tmp_path / "gemma", tiny_folder, **GEMMA)
    job = {"validation": pair_rows(5), "micro_batch_tokens": 120, "batch_tokens": 4096, "max_steps": 4}
    control = trained(make_job(pair_rows(), method="dpo", model=model, **job))
    assert ended(control) == "completed"
    compute = last_manifest(control)["compute"]
    assert (compute["dtype"], compute["engine"]) == (
        ("bfloat16", "finery") if other == "bf16" else ("float32", "transformers")
    )
    start, first = control.steps[0].evaluation.metrics, control.steps[1].metrics
    for found in (start, first):
        assert (found["margin"], found["kl"], found["accuracy"]) == (0.0, 0.0, 0.5)
    assert evaluations(control)[4] < LN2 - 0.1


def test_the_customer_stops_a_job_while_the_reference_is_computed(make_job: MakeJob, monkeypatch: Any) -> None:
    control = make_job(pair_rows(), method="dpo", micro_batch_tokens=16)
    run.main(control.attempt(pb.ATTEMPT_KIND_PREPARE))
    done: list[int] = []
    planes: list[ControlPlane] = []
    log_probs = Learner.log_probs

    def connect(*arguments: Any) -> ControlPlane:
        planes.append(ControlPlane(*arguments))
        return planes[-1]

    def slow(self: Learner, batch: Any, temperature: float = 1.0) -> Tensor:
        done.append(batch.scored)
        control.intent = pb.INTENT_CANCEL
        with planes[-1].changed:
            assert planes[-1].changed.wait_for(lambda: planes[-1].intent is Intent.CANCEL, 20)
        return log_probs(self, batch, temperature)

    control.lease_seconds = 1.0
    monkeypatch.setattr(run, "ControlPlane", connect)
    monkeypatch.setattr(Learner, "log_probs", slow)
    run.main(control.attempt(pb.ATTEMPT_KIND_TRAIN))
    assert ended(control) == "cancelled_by_customer"
    assert len(done) == 1
    assert not control.steps
