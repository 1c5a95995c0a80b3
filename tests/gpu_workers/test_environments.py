"""Graders: what is a reward and what is not, deadlines that kill, and answers that cannot harm each other."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from finery.types.environments import EnvironmentSpec
from finery.types.ids import new_id
from finery_gpu_workers.environments.rewards import open_rewards
from finery_gpu_workers.environments.types import Answer, Grade, Rewards
from finery_gpu_workers.errors import WorkerError

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
        ("os.abort()", "SIGABRT"),
        ("ctypes.string_at(0)", "SIGSEGV"),
        ("x = bytearray(3 << 30)", "MemoryError"),
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


def test_an_answer_that_kills_its_process_is_lost(evaluated: Callable[[str], Grade]) -> None:
    code, message = failed(evaluated("os.kill(os.getpid(), 9)"))
    assert (code, "killed" in message) == ("lost", True)
    assert evaluated("answer = 0.5").reward == 0.5


@pytest.mark.parametrize(
    "code",
    [
        "raise ValueError('a\\ud800b\\0c')",
        "answer = {'a\\ud800b\\0c': 1}",
        "answer = {'a\\ud800b\\0c': None}",
        "answer = 'a\\ud800b\\0c'",
        "os.write(1, b'a\\xffb\\0c')\nanswer = 1",
    ],
)
def test_whatever_customers_code_says_can_be_kept(evaluated: Callable[[str], Grade], code: str) -> None:
    """Half a character is no UTF-8, and PostgreSQL has no NUL."""
    grade = evaluated(code)
    said = json.dumps([grade.parts, grade.printed, grade.failure and grade.failure.model_dump()], ensure_ascii=False)
    assert said.encode() == said.encode("utf-8")
    assert "\\u0000" not in said
    assert "b" in said


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


# ---- what is forged and what is counted


FORGED = "import json\njson.dumps = lambda message: {!r}\nanswer = 1"


@pytest.mark.parametrize(
    ("said", "code"),
    [
        ('{"value": {"number": 1' + "0" * 400 + "}}", "invalid_reward"),
        ('{"value": {"other": {"a": 1}}}', "invalid_reward"),
        ('{"value": {"dict": [[["a"], {"number": "1"}]]}}', "invalid_reward"),
        ('{"killed": true}', "error"),
        ("[1]", "error"),
        ("[" * 100_000, "error"),
    ],
)
def test_a_forged_message_is_a_failure_of_that_grade(evaluated: Callable[[str], Grade], said: str, code: str) -> None:
    assert failed(evaluated(FORGED.format(said)))[0] == code
    assert evaluated("answer = 0.5").reward == 0.5


def test_forged_seconds_are_not_believed(tmp_path: Path) -> None:
    source = (
        "import json\nreal = json.dumps\n"
        "json.dumps = lambda message: real(message | {'cpu': CPU} if 'n' in message else message)\n"
        "def grade(sample, item): return 1\n"
    )
    for cpu, most in (("1e300", 0.0), ("10**400", 0.0), ("1e8", 200.0), ("-1", 0.0), ("True", 1.0)):
        with rewards_of(python(source.replace("CPU", cpu)), tmp_path) as rewards:
            grade = rewards.submit(Answer("", {})).result()
        assert grade.reward == 1
        assert 0 <= grade.cpu_seconds <= most


def test_entries_of_one_name_are_not_lost(evaluated: Callable[[str], Grade]) -> None:
    code, message = failed(evaluated("answer = {1: 0.5, '1': 0.25}"))
    assert (code, "['1'] twice" in message) == ("invalid_reward", True)


def test_tracebacks_show_no_folders_of_this_machine(evaluated: Callable[[str], Grade], tmp_path: Path) -> None:
    code, message = failed(evaluated("import json; json.loads('{')"))
    assert code == "error"
    assert 'File "json/decoder.py", line ' in message
    assert sys.base_prefix not in message
    with pytest.raises(WorkerError) as refused, rewards_of(python("x = 1\ndef grade(sample, item)\n"), tmp_path):
        pass
    lines = refused.value.message.splitlines()
    assert lines[1].strip() == 'File "grader.py", line 2'
    assert "importlib" not in refused.value.message


SPIN = "t = time.process_time()\nwhile time.process_time() - t < 0.5: pass\n"
UNWAITED = (
    "ours, theirs = os.pipe()\n"
    f"if os.fork() == 0:\n    exec({SPIN!r})\n    os.write(theirs, b'x')\n    time.sleep(60)\n"
)
EATEN = "if os.fork() == 0:\n    x = b'x' * (600 << 20)\n    time.sleep(60)\n"


@pytest.mark.parametrize(
    ("code", "failure"),
    [(f"{UNWAITED}os.read(ours, 1)\nanswer = 1", None), (f"{SPIN}{EATEN}{EATEN}time.sleep(60)", "error")],
    ids=["left running", "ended for its memory"],
)
def test_cpu_seconds_are_counted_however_a_call_ends(
    evaluated: Callable[[str], Grade], code: str, failure: str | None
) -> None:
    grade = evaluated(code)
    assert (grade.failure.code if grade.failure else None) == failure
    assert 0.5 <= grade.cpu_seconds < 4.0


def test_loading_is_not_counted_where_a_call_is_killed(tmp_path: Path) -> None:
    source = f"import time\n{SPIN}def grade(sample, item): time.sleep(item['seconds'])\n"
    with rewards_of(python(source, timeout_seconds=1), tmp_path) as rewards:
        grade = rewards.submit(Answer("", {"seconds": 60})).result()
    assert failed(grade)[0] == "timeout"
    assert grade.cpu_seconds < 0.3
