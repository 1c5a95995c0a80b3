"""What the steps of each method may hold."""

from __future__ import annotations

import json

import grpc
import pytest

from finery_protos.v1 import worker_pb2 as pb
from finery_service.rpc import step_checks
from finery_service.rpc.checks import Refused
from finery_testing.control import rollout_file

Code = grpc.StatusCode


DEEP = '{"a":' * 101 + "1" + "}" * 101
USAGE = pb.Usage(sku="train.rl", unit="step:1", quantity=1)


@pytest.mark.parametrize(
    ("method", "bad", "message"),
    [
        (
            "dpo",
            pb.Step(step=1, usage=[pb.Usage(sku="train.sft", unit="step:1")]),
            "train.dpo, eval.dpo, found 'train.sft'",
        ),
        (
            "dpo",
            pb.Step(step=1, usage=[pb.Usage(sku="reward.cpu_seconds", unit="step:1")]),
            "found 'reward.cpu_seconds'",
        ),
        ("sft", pb.Step(step=1, usage=[pb.Usage(sku="rollout.prefill", unit="step:1")]), "found 'rollout.prefill'"),
        ("rl", pb.Step(step=1, usage=[pb.Usage(sku="train.dpo", unit="step:1")]), "eval.rl, found 'train.dpo'"),
        ("rl", pb.Step(step=1, usage=[USAGE, USAGE]), "each SKU once in a step, found train.rl twice"),
        ("rl", pb.Step(step=1, usage=[pb.Usage(sku="rollout.generated", unit="eval:1")]), "expected step:1"),
        ("rl", pb.Step(step=1, usage=[pb.Usage(sku="eval.rl", unit="step:1")]), "expected eval:1"),
        ("rl", pb.Step(step=1, usage=[pb.Usage(sku="reward.llm_input", unit="step:2")]), "expected step:1 or eval:1"),
        ("rl", pb.Step(step=0, usage=[pb.Usage(sku="reward.llm_input", unit="step:0")]), "steps from 1"),
        ("rl", pb.Step(step=1, evaluation=pb.Evaluation(loss=1.0)), "evaluation.loss: expected none of an RL job"),
        ("dpo", pb.Step(step=1, evaluation=pb.Evaluation(metrics={"accuracy": 1.0})), "evaluation.loss: expected one"),
        ("rl", pb.Step(step=1, evaluation=pb.Evaluation(metrics={"loss": 1.0})), "none of ours, found 'loss'"),
        ("rl", pb.Step(step=1, evaluation=pb.Evaluation(metrics={"tokens": 1.0})), "none of ours, found 'tokens'"),
        ("rl", pb.Step(step=1, evaluation=pb.Evaluation(metrics={"pass@1": 1.0})), "found 'pass@1'"),
        ("rl", pb.Step(step=1, evaluation=pb.Evaluation(tokens=-1)), "tokens: expected >= 0"),
        ("rl", pb.Step(step=1, evaluation_rollouts=pb.RolloutFile()), "expected the evaluation next to them"),
        ("rl", pb.Step(step=0, rollouts=pb.RolloutFile()), "step 0 holds only the evaluation"),
        ("rl", pb.Step(step=1, rollouts=pb.RolloutFile()), "rollouts.key: expected an object key below"),
        ("rl", pb.Step(step=1, rollouts=rollout_file("x/../y")), "rollouts.key: expected an object key below"),
        (
            "rl",
            pb.Step(step=1, notices=[pb.Notice(type="state", data_json="{}")]),
            "one of warning, rollout, found 'state'",
        ),
        (
            "rl",
            pb.Step(step=1, notices=[pb.Notice(type="rollout", data_json="[]")]),
            "expected a JSON object, found list",
        ),
        (
            "rl",
            pb.Step(step=1, notices=[pb.Notice(type="rollout", data_json='{"a": NaN}')]),
            "which JSON does not have",
        ),
        (
            "rl",
            pb.Step(step=1, notices=[pb.Notice(type="rollout", data_json='{"a": 1e999}')]),
            "a number that is too large",
        ),
        ("rl", pb.Step(step=1, notices=[pb.Notice(type="rollout", data_json="[" * 9000)]), "nested too deeply"),
        ("rl", pb.Step(step=1, notices=[pb.Notice(type="rollout", data_json=DEEP)]), "nested too deeply"),
        (
            "rl",
            pb.Step(step=1, notices=[pb.Notice(type="warning", data_json='{"code": "x"}')]),
            "with code and message",
        ),
        (
            "rl",
            pb.Step(
                step=1,
                notices=[pb.Notice(type="rollout", data_json=json.dumps({"text": "é" * 8192}, ensure_ascii=False))],
            ),
            "at most 16384 bytes, found 16396",
        ),
        (
            "rl",
            pb.Step(step=1, notices=[pb.Notice(type="rollout", data_json="{}")] * 33),
            "at most 32 in a step, found 33",
        ),
    ],
)
def test_what_a_method_does_not_have_is_refused(method: str, bad: pb.Step, message: str) -> None:
    def check() -> None:
        step_checks.check([bad])
        step_checks.check_against_job([bad], method, "ten_1/jobs/job_1/att_1/")

    with pytest.raises(Refused, match=message) as caught:
        check()
    assert caught.value.code is Code.INVALID_ARGUMENT
