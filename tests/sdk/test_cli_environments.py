"""`finery environments`, and jobs of DPO and RL on the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from .cli_api import Api
from .methods_history import DPO, RL
from .support import NOW, checkpoint_json, error_json, file_json, job_json, page_json
from .test_cli_more import DATA, SET

GYM = {"type": "reasoning_gym", "task": "chain_sum", "config": {"max_terms": 3}, "seed": 0, "size": 500}
ENVIRONMENT = {
    "object": "environment",
    "id": "env_1",
    "project": "proj_1",
    "name": "sums",
    "type": "reasoning_gym",
    "spec": GYM,
    "created_at": NOW,
}
FAILURE = {"code": "timeout", "message": "It took more than 10 s."}
RUN = {
    "id": "erun_1",
    "environment": "env_1",
    "status": "ready",
    "prompts": [{"index": 0, "text": "2 + 2 ="}],
    "answers": [
        {"prompt": 0, "output_text": "4", "reward": 1.0},
        {"prompt": 0, "output_text": "\x1b[31m5", "failure": FAILURE},
    ],
    "created_at": NOW,
}
ROLLOUT = {
    "id": "roll_2_5",
    "job": "job_1",
    "step": 2,
    "group": 1,
    "sample": 1,
    "prompt": 17,
    "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 +\n2?"}],
    "tokens": [52, 2],
    "text": "4\x1b[31m",
    "finish": "stop",
    "reward": 0.5,
}
LOST = {**ROLLOUT, "id": "roll_2_6", "messages": [], "prompt_text": "3 =", "reward": None, "failure": FAILURE}
REWARD = "def grade(sample, item):\n    return 1.0\n"


@pytest.fixture
def envs(api: Api) -> Api:
    api.answers = {
        "POST /v1/environments": (201, ENVIRONMENT),
        "GET /v1/environments": (200, page_json([ENVIRONMENT])),
        "GET /v1/environments/env_1": (200, ENVIRONMENT),
        "DELETE /v1/environments/env_1": (200, {"object": "environment", "id": "env_1", "deleted": True}),
        "POST /v1/environments/env_1/runs": (201, RUN),
        "GET /v1/jobs/job_1/rollouts": (200, page_json([ROLLOUT, LOST])),
    }
    return api


def words(text: str) -> list[str]:
    return [" ".join(line.split()) for line in text.splitlines()]


@pytest.mark.parametrize(
    "command",
    [
        "environments create --task chain_sum",
        "environments list",
        "environments get env_1",
        "environments run env_1 4",
        "jobs rollouts job_1 --step 2",
    ],
)
def test_json_is_one_document_and_nothing_else(envs: Api, finery: Any, command: str) -> None:
    result = finery(*command.split(), "--json")
    assert result.code == 0, result.err
    assert json.loads(result.out)
    assert finery(*command.split()).code == 0


def test_an_environment_of_reasoning_gym_is_made_of_options(envs: Api, finery: Any) -> None:
    sets = ["--set", "config.max_terms=3", "--set", "size=50", "--set", "answer_pattern=<answer>(.*)</answer>"]
    result = finery("environments", "create", "--task", "chain_sum", *sets, "--name", "sums", "--project", "proj_1")
    assert result.code == 0, result.err
    assert json.loads(envs.sent("POST /v1/environments").body) == {
        "name": "sums",
        "project": "proj_1",
        "spec": {
            "type": "reasoning_gym",
            "task": "chain_sum",
            "config": {"max_terms": 3},
            "size": 50,
            "answer_pattern": "<answer>(.*)</answer>",
        },
    }
    assert {"id env_1", "name sums", "task chain_sum", 'config {"max_terms": 3}'} <= set(words(result.out))
    assert "finery environments run env_1" in result.err


def test_an_environment_of_a_file_uploads_it_and_reads_the_reward_file(envs: Api, finery: Any, tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text("{}\n")
    (tmp_path / "reward.py").write_text(REWARD)
    (tmp_path / "spec.json").write_text(json.dumps({"type": "prompts", "grader": {"timeout_seconds": 2, "name": "r"}}))
    files = ["--file", str(tmp_path / "prompts.jsonl"), "--held-out-file", "file_9"]
    options = ["--spec", str(tmp_path / "spec.json"), "--reward-file", str(tmp_path / "reward.py")]
    result = finery("environments", "create", *files, *options)
    assert result.code == 0, result.err
    grader = {"type": "python", "source": REWARD, "timeout_seconds": 2, "name": "r"}
    spec = {"type": "prompts", "file": "file_1", "held_out_file": "file_9", "grader": grader}
    assert json.loads(envs.sent("POST /v1/environments").body) == {"spec": spec}


def test_a_refusal_of_the_server_is_one_line(envs: Api, finery: Any) -> None:
    refused = error_json("invalid_value", "spec.task: expected a task.", param="spec.task")
    envs.answers["POST /v1/environments"] = (400, refused)
    result = finery("environments", "create", "--task", "nonsense")
    assert (result.code, result.err.splitlines()[0]) == (1, "Error: spec.task: expected a task.")


def test_environments_are_listed_and_deleted(envs: Api, finery: Any) -> None:
    rows = words(finery("environments", "list", "--limit", "3", "--project", "proj_1").out)
    assert rows[1].startswith("env_1 sums reasoning_gym")
    assert envs.sent("GET /v1/environments?project=proj_1&limit=3")
    result = finery("environments", "delete", "env_1")
    assert (result.code, result.err) == (0, "env_1 deleted\n")


def test_answers_are_arguments_or_lines_of_a_file(envs: Api, finery: Any, tmp_path: Path) -> None:
    answers = tmp_path / "answers.jsonl"
    answers.write_text('"5\\n6"\n\n{"prompt": 7, "output_text": "8\u2028"}\n', encoding="utf-8")
    result = finery("environments", "run", "env_1", "4", "four", "--prompt", "2", "--answers", str(answers))
    assert result.code == 0, result.err
    assert json.loads(envs.sent("POST /v1/environments/env_1/runs").body) == {
        "answers": [
            {"prompt": 2, "output_text": "4"},
            {"prompt": 2, "output_text": "four"},
            {"output_text": "5\n6"},
            {"prompt": 7, "output_text": "8\u2028"},
        ],
        "prompts": 5,
    }
    shown = words(result.out)
    assert {"prompt 0: 2 + 2 =", "0 4 1", "0 ␛[31m5 – timeout", "no reward for answer 2: timeout"} <= set(shown)
    assert "1 reward, 1 without one: mean 1, lowest 1, highest 1" in shown
    assert "\x1b[31m5" not in result.out


def test_a_run_is_written_as_a_page(envs: Api, finery: Any, tmp_path: Path) -> None:
    result = finery("environments", "run", "env_1", "4", "--html", str(tmp_path / "run.html"))
    assert (result.code, result.out) == (0, "")
    assert "<td>4</td><td>1</td>" in (tmp_path / "run.html").read_text(encoding="utf-8")


def test_a_run_that_fails_ends_with_1_and_its_reason(envs: Api, finery: Any) -> None:
    error = {"message": "No sandbox can be had.", "type": "x", "code": "sandbox_unavailable"}
    envs.answers["POST /v1/environments/env_1/runs"] = (201, {**RUN, "status": "failed", "error": error})
    result = finery("environments", "run", "env_1", "4")
    assert result.code == 1
    assert "failed (sandbox_unavailable): No sandbox can be had." in result.err


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("environments create --set novalue", "expected name=value, found 'novalue'"),
        ("environments create --reward-file nothing.py", "nothing.py"),
        ("environments create --reward-file empty.py", "empty.py: expected `def grade(sample, item)`"),
        ("environments create --spec list.json", "list.json: expected a JSON object, found list"),
        ("environments run env_1 --answers wrong.jsonl", "wrong.jsonl, line 2: expected a text or an object"),
        ("environments run env_1 --answers number.jsonl", "found int: 7"),
        ("jobs create --method rl --environment nothing", "expected the id of an environment or the path of a spec"),
        ("jobs create --method rl --reward-file reward.py", "environments create --file PROMPTS"),
        ("jobs create --environment env_1 --reward-file reward.py", "expected --environment, the path of a"),
    ],
)
def test_wrong_usage_ends_with_2_and_sends_nothing(
    envs: Api, finery: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)  # short names: a box of the terminal's width wraps long ones
    contents = {"empty.py": "", "list.json": "[1]", "wrong.jsonl": '"a"\n{', "number.jsonl": "7\n", "reward.py": REWARD}
    for name, content in contents.items():
        (tmp_path / name).write_text(content)
    result = finery(*command.split())
    assert result.code == 2
    assert said in " ".join(result.err.replace("│", "").split())
    assert envs.server is not None
    assert envs.server.seen == []


def test_a_dpo_job_is_made_of_options(api: Api, finery: Any) -> None:
    sets = ["--set", "beta=0.2", "--set", "loss=ipo", "--set", "priority=high"]
    options = ["--method", "dpo", "--from-checkpoint", "ckpt_1", "--file", "file_1"]
    assert finery("jobs", "create", *options, *sets).code == 0
    assert json.loads(api.sent("POST /v1/jobs").body) == {
        "method": "dpo",
        "from_checkpoint": "ckpt_1",
        "training_file": "file_1",
        "priority": "high",
        "hyperparameters": {"beta": 0.2, "loss": "ipo"},
    }


@pytest.mark.parametrize("given", ["id", "file", "set"])
def test_an_rl_job_is_made_of_options(api: Api, finery: Any, tmp_path: Path, given: str) -> None:
    (tmp_path / "env.json").write_text(json.dumps({"type": "prompts", "file": "file_1"}))
    (tmp_path / "reward.py").write_text(REWARD)
    reward = ["--reward-file", str(tmp_path / "reward.py")]
    options, environment = {
        "id": (["--environment", "env_1"], "env_1"),
        "file": (
            ["--environment", str(tmp_path / "env.json"), *reward],
            {"type": "prompts", "file": "file_1", "grader": {"type": "python", "source": REWARD}},
        ),
        "set": (
            ["--set", "environment.type=reasoning_gym", "--set", "environment.task=chain_sum"],
            {"type": "reasoning_gym", "task": "chain_sum"},
        ),
    }[given]
    sets = ["--set", "steps=3", "--set", 'stop=["</answer>"]']
    result = finery("jobs", "create", "--method", "rl", "--model", "m", *options, *sets)
    assert result.code == 0, result.err
    assert json.loads(api.sent("POST /v1/jobs").body) == {
        "method": "rl",
        "model": "m",
        "environment": environment,
        "hyperparameters": {"steps": 3, "stop": ["</answer>"]},
    }


def test_rollouts_are_a_readable_list(envs: Api, finery: Any) -> None:
    result = finery("jobs", "rollouts", "job_1", "--step", "2", "--kind", "eval")
    assert words(result.out) == [
        "step prompt sample reward tokens end asked answer",
        "2 17 1 0.5 2 stop 2 +⏎ 2? 4␛[31m",
        "2 17 1 no reward: timeout 2 stop 3 = 4␛[31m",
    ]
    assert envs.sent("GET /v1/jobs/job_1/rollouts?step=2&kind=eval&limit=20")
    envs.answers["GET /v1/jobs/job_1/rollouts"] = (200, page_json([ROLLOUT] * 5, has_more=True, last_id="roll_2_5"))
    assert len(json.loads(finery("jobs", "rollouts", "job_1", "--limit", "3", "--json").out)) == 3
    assert envs.sent("GET /v1/jobs/job_1/rollouts?kind=train&limit=3")
    envs.answers["GET /v1/jobs/job_1/rollouts"] = (200, page_json([]))
    none = finery("jobs", "rollouts", "job_1")
    assert (none.code, none.out, none.err) == (0, "", "No rollouts of that kind yet; only RL jobs have some.\n")


def test_events_of_dpo_and_rl_are_lines_for_people(api: Api, finery: Any) -> None:
    api.answers = {"GET /v1/jobs/job_1/events": (200, page_json(RL))}
    lines = [line[40:] for line in finery("jobs", "events", "job_1").out.splitlines()]
    assert lines[2] == "before training  held-out reward 0.25  reward_low 0.125  reward_high 0.5  pass_at_4 0.5"
    assert lines[3].startswith("step 1/4  reward 0.125  loss -0.5  kl 0  trained_tokens 24")
    assert lines[5:7] == ["step 2  reward 1  2 +⏎ 2 = ␛[31m? → 4", "step 2  no reward: timeout  2 +⏎ 2 = ␛[31m? → 4"]
    assert lines[8] == "step 2  reward 0.25  2 +⏎ 2 = ␛[31m? → 4"
    assert lines[9] == "step 2  ckpt_2  held-out reward 0.75"
    assert lines[10].startswith("step 3/4  loss -0.5"), "no reward is not 0"
    api.answers = {"GET /v1/jobs/job_1/events": (200, page_json(DPO))}
    lines = [line[40:] for line in finery("jobs", "events", "job_1").out.splitlines()]
    assert lines[2].startswith("step 1/2  loss 0.693  margin 0  accuracy 0.5  kl 0.5")
    assert lines[4] == "step 2  held-out loss 0.625  accuracy 0.75  margin 0.125"


def test_an_rl_job_and_its_checkpoints_show_environment_and_reward(api: Api, finery: Any) -> None:
    job = job_json(method="rl", training_file=None, environment=GYM, usage={"train.rl": 24, "rollout.generated": 64})
    best = checkpoint_json({}, best=True, final=False, validation_reward=0.75)
    api.answers = {"GET /v1/jobs/job_1": (200, job), "GET /v1/checkpoints": (200, page_json([best]))}
    shown = words(finery("jobs", "get", "job_1").out)
    assert {"method rl", "environment reasoning_gym", "usage train.rl 24, rollout.generated 64"} <= set(shown)
    assert words(finery("checkpoints", "list").out)[1].startswith("ckpt_1 job_1 3 ★ best reward 0.75 adapter")
    api.answers["GET /v1/jobs/job_1"] = (200, {**job, "environment_id": "env_1"})
    assert "environment env_1" in words(finery("jobs", "get", "job_1").out)


@pytest.mark.parametrize(
    ("format_", "said"),
    [
        ("prompts", ["train data prompts, 95 of 100 prompts used", "tokens 12,345"]),
        (
            "preference",
            ["train data preference, 95 of 100 pairs used", "tokens 12,345, 2,469 (20.0%) trained in one pass"],
        ),
    ],
)
def test_data_of_pairs_and_prompts_is_called_by_its_name(api: Api, finery: Any, format_: str, said: list[str]) -> None:
    data = {**DATA, "sets": {"train": {**SET, "format": format_}}, "warnings": []}
    api.answers = {"GET /v1/jobs/job_1": (200, job_json(data=data))}
    assert set(said) <= set(words(finery("jobs", "get", "job_1").out))


def test_a_jobs_own_upload_is_of_its_format(api: Api, finery: Any, tmp_path: Path) -> None:
    api.upload = file_json(format="preference")
    (tmp_path / "pairs.jsonl").write_text("{}\n")
    result = finery("files", "upload", str(tmp_path / "pairs.jsonl"))
    assert "format preference jsonl" in words(result.out)
