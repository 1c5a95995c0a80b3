"""Runs of environments by the real worker: prompts shown, answers graded, nothing trained."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import pytest

from finery.types.environments import EnvironmentRunCreate, GradedAnswer, SampleAnswer, ShownPrompt
from finery.types.ids import new_id
from finery_gpu_workers import run
from finery_gpu_workers.methods.grade import _prompts_json
from finery_protos.v1 import worker_pb2 as pb
from finery_testing.control_plane import FakeControlPlane

from .conftest import MakeJob, ended

FILE = new_id("file", 1)
ROWS = [{"messages": [{"role": "user", "content": f"Say {word}"}], "word": word} for word in ("red", "green", "blue")]


def prompts_environment(grader: dict[str, Any]) -> dict[str, Any]:
    return {"environment": {"type": "prompts", "file": FILE, "grader": grader}}


def python(source: str, **options: Any) -> dict[str, Any]:
    return prompts_environment({"type": "python", "source": source, **options})


def graded(control: FakeControlPlane, *answers: tuple[int, str], prompts: int = 5) -> list[GradedAnswer]:
    given = tuple(SampleAnswer(prompt=place, output_text=text) for place, text in answers)
    control.run_json = EnvironmentRunCreate(answers=given, prompts=prompts).model_dump_json()
    run.main(control.attempt(pb.ATTEMPT_KIND_PREPARE))
    if control.graded is None:
        return []
    return [GradedAnswer.model_validate(answer) for answer in json.loads(control.graded.answers_json)]


def test_answers_get_rewards_and_prompts_are_shown(make_job: MakeJob) -> None:
    grader = {"type": "string_check", "operation": "eq", "reference": "{{ item.word }}"}
    control = make_job(ROWS, method="rl", spec=prompts_environment(grader))
    answers = graded(control, (0, "red"), (1, "red"), (2, "blue"), prompts=2)
    assert [answer.reward for answer in answers] == [1.0, 0.0, 1.0]
    assert [answer.output_text for answer in answers] == ["red", "red", "blue"]
    assert control.graded is not None
    assert control.graded.prompt_count == 3
    shown = json.loads(control.graded.prompts_json)
    assert [(prompt["index"], prompt["item"]) for prompt in shown] == [(0, ROWS[0]), (1, ROWS[1])]
    assert shown[1]["messages"] == ROWS[1]["messages"]
    assert control.calls == ["Begin", "ReportEnvironmentRun"]


def test_failures_are_shown_at_their_answers(make_job: MakeJob) -> None:
    source = (
        "def grade(sample, item):\n"
        "    print('asked about', item['word'])\n"
        "    if sample['output_text'] == 'stop':\n        raise ValueError('no ' + item['word'])\n"
        "    return {'length': len(sample['output_text']), 'role': sample['messages'][0]['role'] == 'user'}\n"
    )
    control = make_job(ROWS, method="rl", spec=python(source))
    good, bad = graded(control, (0, "abc"), (2, "stop"))
    assert (good.reward, good.parts, good.printed) == (4.0, {"length": 3.0, "role": 1.0}, "asked about red\n")
    assert bad.reward is None
    assert bad.failure is not None
    assert (bad.failure.code, bad.failure.grader, bad.printed) == ("error", "python", "asked about blue\n")
    assert 'File "grader.py", line 4, in grade' in bad.failure.message
    assert "ValueError: no blue" in bad.failure.message


def test_tasks_of_reasoning_gym(make_job: MakeJob) -> None:
    environment = {"type": "reasoning_gym", "task": "chain_sum", "seed": 3, "size": 40, "answer_pattern": r"= (-?\d+)"}
    control = make_job(None, method="rl", spec={"environment": environment})
    # 57 + 87 + 70 = 214 and 205 - 838 + 505 = -128, by hand
    answers = graded(control, (0, "It is = 214"), (1, "It is = -128"), (1, "It is = 128"), (1, "-128"), prompts=2)
    assert [answer.reward for answer in answers] == [1.0, 1.0, 0.0, 0.0]
    assert control.graded is not None
    assert control.graded.prompt_count == 40
    shown = json.loads(control.graded.prompts_json)
    assert [prompt["item"]["answer"] for prompt in shown] == ["214", "-128"]
    assert shown[0]["messages"][-1]["content"].endswith("57 + 87 + 70 =")


@pytest.mark.parametrize(
    ("spec", "answers", "param", "message"),
    [
        (python("def grade(sample, item): return 1"), [(3, "x")], "answers.0.prompt", "from 0 to 2, found 3"),
        (python("1 +"), [], "environment.grader.source", "SyntaxError"),
        (python("import numpy"), [], "environment.grader.source", "No module named 'numpy'"),
        (python("score = 1"), [(0, "x")], "environment.grader.source", "a function grade"),
    ],
)
def test_what_cannot_be_used_ends_the_run(
    make_job: MakeJob, spec: dict[str, Any], answers: list[tuple[int, str]], param: str, message: str
) -> None:
    control = make_job(ROWS, method="rl", spec=spec)
    assert graded(control, *answers) == []
    assert ended(control) == "invalid_environment"
    assert control.finished is not None
    assert control.finished.error is not None
    assert control.finished.error.param == param
    assert message in control.finished.error.message


def test_a_cancelled_run_ends_soon_and_kills_its_graders(make_job: MakeJob) -> None:
    source = "import time\ndef grade(sample, item): time.sleep(600)"
    control = make_job(ROWS, method="rl", spec=python(source, timeout_seconds=100))
    control.lease_seconds = 1.5  # a heartbeat, which brings the intent, every half second

    def cancel() -> None:
        control.intent = pb.INTENT_CANCEL

    timer = threading.Timer(1.0, cancel)
    timer.start()
    began = time.monotonic()
    assert graded(control, (0, "x"), (1, "y")) == []
    timer.join()
    assert time.monotonic() - began < 20
    assert ended(control) == "cancelled_by_customer"


def test_large_answers_fit_one_message(make_job: MakeJob) -> None:
    control = make_job(ROWS, method="rl", spec=python("def grade(sample, item): return len(sample['output_text'])"))
    answers = graded(control, *[(0, "x" * 200_000)] * 30)
    assert [answer.reward for answer in answers] == [200_000.0] * 30
    assert control.graded is not None
    assert len(control.graded.SerializeToString()) < 3_500_000
    assert {len(answer.output_text) for answer in answers} == {4000}


def test_a_held_out_file_comes_after_the_prompts(make_job: MakeJob) -> None:
    control = make_job(
        ROWS[:2],
        validation=ROWS[2:],
        method="rl",
        spec=python("def grade(sample, item): return item['word'] == 'blue'"),
    )
    answers = graded(control, (1, ""), (2, ""), prompts=3)
    assert [answer.reward for answer in answers] == [0.0, 1.0]
    assert control.graded is not None
    assert control.graded.prompt_count == 3


def test_prompts_are_as_many_as_a_message_holds_in_bytes() -> None:
    prompts = [ShownPrompt(index=place, text="\N{CJK UNIFIED IDEOGRAPH-4E00}" * 300_000) for place in range(4)]
    shown = _prompts_json(prompts)
    assert [one["index"] for one in json.loads(shown)] == [0]
    assert len(shown.encode()) < 1_500_000
