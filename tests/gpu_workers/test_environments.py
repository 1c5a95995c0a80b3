"""Graders: what is a reward and what is not, deadlines that kill, and answers that cannot harm each other."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from finery.types.environments import EnvironmentSpec, ReasoningGymEnvironment
from finery.types.ids import new_id
from finery_gpu_workers.environments.prompts import write_prompts
from finery_gpu_workers.environments.rewards import open_rewards
from finery_gpu_workers.environments.types import Answer, Grade, Rewards
from finery_gpu_workers.errors import WorkerError
from finery_gpu_workers.sandbox import backend as backends
from finery_gpu_workers.sandbox import process
from finery_gpu_workers.sandbox.backend import Backend
from finery_gpu_workers.sandbox.limits import SandboxUnavailable

SPEC: TypeAdapter[EnvironmentSpec] = TypeAdapter(EnvironmentSpec)
FILE = new_id("file", 2)


@contextmanager
def rewards_of(grader: dict[str, Any], folder: Path, workers: int = 1) -> Iterator[Rewards]:
    spec = SPEC.validate_python({"type": "prompts", "file": FILE, "grader": grader})
    rewards = open_rewards(spec, folder, workers=workers, score_models={})
    try:
        yield rewards
    finally:
        rewards.close()


def python(source: str, **options: Any) -> dict[str, Any]:
    return {"type": "python", "source": source, **options}


def failed(grade: Grade) -> tuple[str, str]:
    assert grade.reward is None
    assert grade.failure is not None
    return grade.failure.code, grade.failure.message


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Grade]]:
    """A grader that returns the value of the answer's text, with the standard library at hand."""
    source = (
        "import os, sys, time, signal, threading, subprocess, ctypes\n"
        "seen = []\n"
        "def grade(sample, item):\n"
        "    scope = dict(globals(), sample=sample, item=item)\n"
        "    exec(sample['output_text'], scope)\n"
        "    return scope['answer']\n"
    )
    with rewards_of(python(source, timeout_seconds=5), tmp_path_factory.mktemp("rewards")) as rewards:
        yield lambda code: rewards.submit(Answer(code, {"n": 1})).result()


# ---- what is a reward (C02)


@pytest.mark.parametrize(
    ("value", "reward", "parts"),
    [
        ("0.7", 0.7, {}),
        ("1", 1.0, {}),
        ("True", 1.0, {}),
        ("-3", -3.0, {}),
        ("{'exact': 1, 'style': 0.25}", 1.25, {"exact": 1.0, "style": 0.25}),
    ],
)
def test_numbers_are_rewards(
    evaluated: Callable[[str], Grade], value: str, reward: float, parts: dict[str, float]
) -> None:
    grade = evaluated(f"answer = {value}")
    assert (grade.reward, grade.parts, grade.failure) == (reward, parts, None)


@pytest.mark.parametrize(
    ("value", "code", "message"),
    [
        ("None", "no_reward", "found None; None is not 0"),
        ("float('nan')", "invalid_reward", "found nan"),
        ("float('inf')", "invalid_reward", "found inf"),
        ("'0.7'", "invalid_reward", "found str '0.7'"),
        ("[1]", "invalid_reward", "found list"),
        ("10**400", "invalid_reward", "too large"),
        ("{}", "no_reward", "empty dict"),
        ("{'f1': 1, 'f2': float('nan')}", "invalid_reward", "['f2']: expected a finite number, found nan"),
        ("{'f1': 1, 'f2': None}", "no_reward", "['f2']"),
        ("{'f1': 1e308, 'f2': 1e308}", "invalid_reward", "overflow"),
        ("1 / 0", "error", "ZeroDivisionError"),
    ],
)
def test_all_else_is_a_failure_and_never_0(
    evaluated: Callable[[str], Grade], value: str, code: str, message: str
) -> None:
    found, shown = failed(evaluated(f"answer = {value}"))
    assert found == code
    assert message in shown


# ---- what one answer does to others


@pytest.mark.parametrize(
    ("code", "failure"),
    [
        ("os._exit(0)", "exit status 0"),
        ("sys.exit(3)", "SystemExit"),
        ("os.kill(os.getpid(), 9)", "SIGKILL"),
        ("os.abort()", "SIGABRT"),
        ("ctypes.string_at(0)", "SIGSEGV"),
        ("x = bytearray(3 << 30)", "MemoryError"),
        ("sys.setrecursionlimit(10**9)\ndef f(n): return f(n + 1)\nf(0)", ""),
        ('os.write(3, b\'{"n": 1, "value": {"number": 100}}\')', "Bad file descriptor"),
        ("ctypes.CDLL(None).write(3, b'{}', 2)\nos._exit(0)", "exit status 0"),
        ("open('/proc/1/mem', 'r+b')", "Error"),
        ("open(f'/proc/{os.getppid()}/mem', 'r+b')", "Error"),
    ],
)
def test_an_answer_that_breaks_its_grader_breaks_no_other(
    evaluated: Callable[[str], Grade], code: str, failure: str
) -> None:
    kind, message = failed(evaluated(code + "\nanswer = 1.0"))
    assert kind == "error"
    assert failure in message
    assert evaluated("answer = 0.5").reward == 0.5


def test_nothing_is_left_of_an_answer(evaluated: Callable[[str], Grade]) -> None:
    leave = (
        "seen.append(1)\nos.environ['LEFT'] = '1'\nsys.modules['json'] = None\n"
        "path = os.environ['TMPDIR']\nos.makedirs(path + '/a/b')\nopen(path + '/a/b/c', 'w').write('x')\n"
        "os.chmod(path + '/a', 0)\n"
        "if os.fork() == 0:\n    os.setsid()\n    time.sleep(600)\n"
        "answer = len(seen)"
    )
    assert evaluated(leave).reward == 1.0
    look = (
        "import json\nfound = [seen, os.environ.get('LEFT'), os.listdir(os.environ['TMPDIR'])]\n"
        "if os.path.isdir('/proc/1'): found += [n for n in os.listdir('/proc') if n.isdigit() and int(n) not in "
        "(1, os.getpid())]\nprint(found)\nanswer = found == [[], None, []]"
    )
    grade = evaluated(look)
    assert grade.reward == 1.0, grade.printed


def test_a_late_process_of_one_answer_says_nothing_for_the_next(evaluated: Callable[[str], Grade]) -> None:
    late = (
        "if os.fork() == 0:\n    os.setsid()\n    time.sleep(0.1)\n"
        '    for fd in range(3, 64):\n        try: os.write(fd, b\'{"value": {"number": 99.0}}\\n\')\n'
        "        except OSError: pass\n    os._exit(0)\nanswer = 0.25"
    )
    assert evaluated(late).reward == 0.25
    assert [evaluated("time.sleep(0.05)\nanswer = 0.5").reward for _ in range(4)] == [0.5] * 4


def test_prints_are_caught_and_bounded(evaluated: Callable[[str], Grade]) -> None:
    grade = evaluated("print('seen', item)\nsys.stderr.write('and heard')\nsys.stderr.flush()\nanswer = 1")
    assert sorted(grade.printed.splitlines()) == sorted(["and heardseen {'n': 1}"])
    flood = evaluated("for n in range(100): os.write(1, b'y' * (1 << 20))\nanswer = 1")
    assert (flood.reward, flood.printed) == (1.0, "y" * 2000)


def test_cpu_seconds_of_customers_code_are_counted(evaluated: Callable[[str], Grade]) -> None:
    busy = evaluated("while time.process_time() < 0.3: pass\nanswer = 1")
    assert 0.29 < busy.cpu_seconds < 1.0
    assert evaluated("time.sleep(0.3)\nanswer = 1").cpu_seconds < 0.2


# ---- deadlines (C15), lost processes


def test_each_of_three_that_hang_is_a_timeout_and_the_others_get_their_rewards(tmp_path: Path) -> None:
    source = (
        "import signal, time\n"
        "def grade(sample, item):\n"
        "    if item['kind'] == 'power': return 5**(5**(5**5))\n"
        "    if item['kind'] == 'sleep': time.sleep(3600)\n"
        "    if item['kind'] == 'deaf':\n"
        "        signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "        while True: pass\n"
        "    return 0.5\n"
    )
    kinds = ["power", "good", "sleep", "good", "deaf", "good", "good"]
    before = set(_below(os.getpid()))
    with rewards_of(python(source, timeout_seconds=2), tmp_path, workers=2) as rewards:
        grades = [rewards.submit(Answer("", {"kind": kind})) for kind in kinds]
        done = [grade.result(60) for grade in grades]
        for kind, grade in zip(kinds, done, strict=True):
            if kind == "good":
                assert grade.reward == 0.5
            else:
                assert failed(grade)[0] == "timeout"
                assert 2.0 <= grade.seconds < 5.0
        assert done[0].cpu_seconds > 0.5
        assert done[2].cpu_seconds < 0.5
        processes = set(_below(os.getpid())) - before
        assert len(processes) >= 2
    assert [pid for pid in processes if Path(f"/proc/{pid}").exists()] == []


def _below(pid: int) -> list[int]:
    found, waiting = [], [pid]
    while waiting:
        for task in Path(f"/proc/{waiting.pop()}/task").glob("*/children"):
            try:
                children = [int(child) for child in task.read_text().split()]
            except OSError:
                continue
            found += children
            waiting += children
    return found


def _programs() -> list[int]:
    """What runs graders: the innermost processes with the harness as their text."""
    found = []
    for pid in _below(os.getpid()):
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if command[0] != b"bwrap" and any(b"Runs inside the sandbox" in part for part in command[4:6]):
            found.append(pid)
    return found


def test_a_killed_process_is_replaced_once_and_then_the_grade_is_lost(tmp_path: Path) -> None:
    source = "import time\ndef grade(sample, item):\n    time.sleep(item['seconds'])\n    return 0.75\n"
    before = set(_programs())
    with rewards_of(python(source, timeout_seconds=60), tmp_path) as rewards:
        assert rewards.submit(Answer("", {"seconds": 0})).result().reward == 0.75
        [first] = set(_programs()) - before
        future = rewards.submit(Answer("", {"seconds": 1}))
        time.sleep(0.2)
        os.kill(first, signal.SIGKILL)
        assert future.result(30).reward == 0.75
        future = rewards.submit(Answer("", {"seconds": 3600}))
        killed: set[int] = set()
        deadline = time.monotonic() + 30
        while not future.done() and time.monotonic() < deadline:
            for pid in set(_programs()) - before - killed:
                time.sleep(0.1)
                os.kill(pid, signal.SIGKILL)
                killed.add(pid)
            time.sleep(0.02)
        assert failed(future.result(0))[0] == "lost"
        assert rewards.submit(Answer("", {"seconds": 0})).result().reward == 0.75


def test_a_hanging_import_is_an_error_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from finery_gpu_workers.environments import calls

    monkeypatch.setattr(calls, "_LOAD_SECONDS", 1.0)
    with (
        pytest.raises(WorkerError, match="loading took longer than 1 s") as found,
        rewards_of(python("while True: pass"), tmp_path),
    ):
        pass
    assert (found.value.code, found.value.param) == ("invalid_environment", "environment.grader.source")


def test_closing_ends_what_runs_and_what_waits(tmp_path: Path) -> None:
    source = "import time\ndef grade(sample, item): time.sleep(600)\n"
    with rewards_of(python(source, timeout_seconds=100), tmp_path) as rewards:
        running, waiting = rewards.submit(Answer("", {})), rewards.submit(Answer("", {}))
        while not running.running():
            time.sleep(0.01)
        began = time.monotonic()
    assert time.monotonic() - began < 15
    assert failed(running.result(0))[0] == "lost"
    assert waiting.cancelled()
    with pytest.raises(RuntimeError, match="closed"):
        rewards.submit(Answer("", {}))


def test_where_there_is_no_sandbox_no_code_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(kind: str) -> Backend:
        raise SandboxUnavailable(f"{kind} is off")

    monkeypatch.setattr(process, "probe", broken)
    backends.choose.cache_clear()
    canary = tmp_path / "canary"
    with pytest.raises(WorkerError) as found, rewards_of(python(f"open({str(canary)!r}, 'w')"), tmp_path):
        pass
    assert found.value.code == "sandbox_unavailable"
    assert not canary.exists()
    backends.choose.cache_clear()


def test_graders_work_where_code_may_not_fork(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The backend of an ordinary user without namespaces: each answer gets a process, which ends with it."""
    monkeypatch.setattr(backends, "choose", lambda: Backend("landlock", own_user=False))
    source = (
        "import os, time\nseen = []\ndef grade(sample, item):\n    print('hi')\n    seen.append(1)\n"
        "    if item['kind'] == 'sleep': time.sleep(600)\n    if item['kind'] == 'fork': os.fork()\n"
        "    return len(seen)\n"
    )
    with rewards_of(python(source, timeout_seconds=1), tmp_path) as rewards:
        grades = [rewards.submit(Answer("", {"kind": kind})).result() for kind in ("", "", "sleep", "fork", "")]
    assert [grade.reward for grade in grades] == [1.0, 1.0, None, None, 1.0]
    assert grades[0].printed == "hi\n"
    assert [failed(grade)[0] for grade in grades[2:4]] == ["timeout", "error"]


# ---- texts


@pytest.mark.parametrize(
    ("operation", "text", "reference", "reward"),
    [
        ("eq", "Paris", "Paris", 1.0),
        ("eq", "paris", "Paris", 0.0),
        ("ne", "paris", "Paris", 1.0),
        ("like", "In Paris.", "Paris", 1.0),
        ("like", "Par", "Paris", 0.0),
        ("ilike", "IN PARIS", "Paris", 1.0),
        ("ilike", "STRASSE", "straße", 1.0),
    ],
)
def test_string_checks(tmp_path: Path, operation: str, text: str, reference: str, reward: float) -> None:
    grader = {"type": "string_check", "operation": operation, "reference": "{{ item.answer }}"}
    with rewards_of(grader, tmp_path) as rewards:
        assert rewards.submit(Answer(text, {"answer": reference})).result().reward == reward


def test_a_missing_field_is_a_failure(tmp_path: Path) -> None:
    grader = {"type": "string_check", "operation": "eq", "reference": "{{ item.answer }}"}
    with rewards_of(grader, tmp_path) as rewards:
        assert failed(rewards.submit(Answer("x", {})).result())[0] == "missing_field"


# ---- formulas


def test_a_formula_over_graders(tmp_path: Path) -> None:
    word = {"type": "string_check", "operation": "like", "reference": "{{ item.word }}"}
    short = python("def grade(sample, item):\n    print('looked')\n    return 1 - len(sample['output_text']) / 10")
    multi = {"type": "multi", "graders": {"short": short, "word": word}, "calculate_output": "0.75 * word + short / 2"}
    with rewards_of(multi, tmp_path) as rewards:
        grade = rewards.submit(Answer("blue", {"word": "blue"})).result()
        assert grade.reward == pytest.approx(0.75 + 0.3)
        assert grade.parts == {"short": pytest.approx(0.6), "word": 1.0}
        assert grade.printed == "looked\n"
        assert grade.cpu_seconds > 0
        missing = rewards.submit(Answer("blue", {})).result()
        assert failed(missing)[0] == "missing_field"
        assert missing.failure is not None
        assert missing.failure.grader == "word"
        assert missing.parts == {"short": None, "word": None}


def test_a_formula_without_a_value_is_a_failure(tmp_path: Path) -> None:
    one = {"type": "string_check", "operation": "eq", "reference": "x"}
    with rewards_of({"type": "multi", "graders": {"a": one}, "calculate_output": "1 / a"}, tmp_path) as rewards:
        assert rewards.submit(Answer("x", {})).result().reward == 1.0
        zero = rewards.submit(Answer("y", {})).result()
        assert failed(zero)[0] == "invalid_reward"
        assert zero.parts == {"a": 0.0}


@pytest.mark.parametrize(("formula", "message"), [("a + b", "found b"), ("a +", "found the end")])
def test_a_formula_that_cannot_be_used(tmp_path: Path, formula: str, message: str) -> None:
    one = {"type": "string_check", "operation": "eq", "reference": "x"}
    multi = {"type": "multi", "graders": {"a": one}, "calculate_output": formula}
    with pytest.raises(WorkerError, match=message) as found, rewards_of(multi, tmp_path):
        pass
    assert found.value.code == "invalid_environment"


# ---- reasoning-gym


def task(**fields: Any) -> ReasoningGymEnvironment:
    return ReasoningGymEnvironment.model_validate({"type": "reasoning_gym", "task": "chain_sum", "seed": 3} | fields)


def made(spec: ReasoningGymEnvironment, folder: Path, count: int) -> list[dict[str, Any]]:
    write_prompts(spec, count, folder / "prompts.jsonl", folder)
    return [json.loads(line) for line in (folder / "prompts.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return made(task(), tmp_path_factory.mktemp("rows"), 120)


def test_prompts_are_the_same_each_time_and_longer_files_begin_with_shorter_ones(
    tmp_path: Path, rows: list[dict[str, Any]]
) -> None:
    assert len(rows) == 120
    assert len({row["question"] for row in rows}) > 110
    again = made(task(system_prompt="Be brief."), tmp_path, 101)
    assert again[0]["prompt"][0] == {"role": "system", "content": "Be brief."}
    assert [row["question"] for row in again] == [row["question"] for row in rows[:101]]
    assert [row["prompt"][1:] for row in again] == [row["prompt"] for row in rows[:101]]


def test_config_and_seed_count(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    others = made(task(seed=4, config={"min_terms": 2, "max_terms": 2}), tmp_path, 20)
    assert all(row["metadata"]["num_terms"] == 2 for row in others)
    assert all(other["question"] != row["question"] for other, row in zip(others, rows, strict=False))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"task": "chain_sums"}, "such as chain_sum"),
        ({"config": {"min_terms": -1}}, "min_terms must be positive"),
    ],
)
def test_tasks_that_reasoning_gym_refuses(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(WorkerError, match=message) as found:
        made(task(**fields), tmp_path, 1)
    assert found.value.code == "invalid_environment"


@pytest.mark.parametrize("pattern", ["(a+)+$", "(a|aa)+$"])
def test_a_pattern_that_takes_for_ever_is_a_timeout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: list[dict[str, Any]], pattern: str
) -> None:
    """H11: the process is killed; threads and signals do not stop `re`."""
    from finery_gpu_workers.environments import graders

    monkeypatch.setattr(graders, "_TASK_SECONDS", 2.0)
    spec = task(answer_pattern=pattern)
    rewards = open_rewards(spec, tmp_path, workers=1, score_models={})
    grade = rewards.submit(Answer("a" * 40 + "b", rows[0])).result(60)
    rewards.close()
    assert failed(grade)[0] == "timeout"
    assert grade.seconds < 5.0


def test_an_answer_is_what_the_pattern_finds_last(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    spec, row = task(answer_pattern=r"<answer>(.*?)</answer>"), rows[0]
    rewards = open_rewards(spec, tmp_path, workers=1, score_models={})
    texts = ["<answer>1</answer> no, <answer>214</answer>", "<answer>214</answer> no, <answer>1</answer>", "214"]
    assert [rewards.submit(Answer(text, row)).result(60).reward for text in texts] == [1.0, 0.0, 0.0]
    assert failed(rewards.submit(Answer("1", {"question": "?"})).result(60))[0] == "missing_field"
    assert failed(rewards.submit(Answer("1", row | {"index": 0, "question": "another"})).result(60))[0] == "error"
    rewards.close()
