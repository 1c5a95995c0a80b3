"""A run of an environment as people see it; what answers hold never runs."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from finery._environment_run import bins
from finery.types.environments import EnvironmentRun

from .html import Tags
from .support import NOW

EVIL = "<script>alert(1)</script>\x1b[31m\u202e'\"&"


def run(*answers: dict[str, Any], **more: Any) -> EnvironmentRun:
    graded = [{"prompt": 0, "output_text": "x", **answer} for answer in answers]
    made = {"id": "erun_1", "environment": "env_1", "status": "ready", "created_at": NOW, "answers": graded, **more}
    return EnvironmentRun.model_validate(made)


PROMPTS: list[dict[str, Any]] = [
    {"index": 0, "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?"}]},
    {"index": 1, "text": "3 +\n3 =", "item": {"prompt": "3 +\n3 =", "answer": "6"}},
]
FAILED = {"code": "error", "message": "Traceback:\n  line 3\nKeyError: 'word'", "grader": "python"}


def test_the_table_shows_prompt_answer_reward_parts_and_why_there_is_none() -> None:
    shown = run(
        {"output_text": "4", "reward": 1.0, "parts": {"exact": 1.0, "short": None}},
        {"output_text": "five\nor so", "prompt": 1, "reward": 0.25},
        {"output_text": "y" * 200, "prompt": 1, "failure": FAILED, "printed": "saw 200\n"},
        prompts=PROMPTS,
        prompt_count=1500,
    ).text(color=False)
    assert shown.splitlines() == [
        "env_1 of 1,500 prompts: 3 answers",
        "",
        "prompt 0: 2 + 2?",
        'prompt 1: 3 +⏎ 3 =  item {"answer": "6"}',
        "",
        f"prompt  answer{' ' * 54}  reward  parts             failure",
        f"0       4{' ' * 59}  1       exact 1  short –",
        f"1       five⏎ or so{' ' * 49}  0.25",
        f"1       {'y' * 59}…  –                         error",
        "",
        "no reward for answer 3: error by python",
        "Traceback:",
        "  line 3",
        "KeyError: 'word'",
        "",
        "printed for answer 3",
        "saw 200",
        "",
        "2 rewards, 1 without one: mean 0.625, lowest 0.25, highest 1",
        f"  0.25      1  {'█' * 30}",
        f"     1      1  {'█' * 30}",
    ]


def test_rewards_are_distributed_over_their_values_or_over_eight_ranges() -> None:
    few = run(*[{"reward": 0.0}] * 3, *[{"reward": 1.0}] * 6).text(color=False).splitlines()
    assert few[-3] == "9 rewards: mean 0.6667, lowest 0, highest 1"
    assert [(line.split()[:2], line.count("█")) for line in few[-2:]] == [(["0", "3"], 15), (["1", "6"], 30)]
    # 0, 1, …, 16 in ranges of 2, the last one closed: two each, and three in it.
    many = run(*({"reward": float(n)} for n in range(17))).text(color=False).splitlines()
    assert [line.split()[:4] for line in many[-8:]] == [
        [str(low), "to", str(low + 2), "3" if low == 14 else "2"] for low in range(0, 16, 2)
    ]
    assert many[-9] == "17 rewards: mean 8, lowest 0, highest 16"


def test_one_reason_is_told_once_and_no_reward_is_not_0() -> None:
    timeout = {"code": "timeout", "message": "It took more than 10 s.", "grader": None}
    shown = run({"failure": timeout}, {"failure": timeout}, {"failure": FAILED}).text(color=False)
    assert "no reward for answers 1, 2: timeout\nIt took more than 10 s.\n" in shown
    assert shown.endswith("0 rewards, 3 without one")
    assert "mean" not in shown


def test_a_run_without_answers_shows_its_prompts_and_a_failed_one_its_error() -> None:
    assert run(prompts=PROMPTS[:1]).text(color=False) == "env_1: 0 answers\n\nprompt 0: 2 + 2?"
    error = {"message": "No sandbox can be had.", "type": "x", "code": "sandbox_unavailable"}
    for shown in (failed := run(status="failed", error=error)).text(color=False), failed.html():
        assert "env_1: 0 answers (failed)" in shown
        assert "No sandbox can be had." in shown


def test_wide_characters_take_two_columns() -> None:
    lines = run({"output_text": "你好", "reward": 1.0}, {"output_text": "e\u0301tude", "reward": 0.0}).text(color=False)
    rows = lines.splitlines()[2:5]
    # In columns of a terminal: `answer` is six wide, 你好 four, étude five (its accent takes none).
    assert rows[1:] == ["0       你好    1", "0       e\u0301tude   0"]
    assert rows[0] == "prompt  answer  reward  parts  failure"


HOSTILE = run(
    {"output_text": EVIL, "failure": {"code": EVIL, "message": EVIL, "grader": EVIL}, "printed": EVIL},
    {"output_text": EVIL, "reward": 1.0, "parts": {EVIL: 1.0}},
    prompts=[{"index": 0, "text": EVIL, "item": {EVIL: EVIL}}],
    environment=EVIL,
    status=EVIL,
    error={"message": EVIL, "type": "x", "code": "y"},
)
SHOWN = "<script>alert(1)</script>␛[31m<U+202E>'\"&"


@pytest.mark.parametrize("color", [False, True])
def test_an_answer_cannot_command_the_terminal(color: bool) -> None:
    shown = re.sub(r"\x1b\[(0|1|31)m", "", HOSTILE.text(color=color))
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e]", shown)
    assert shown.count(SHOWN) >= 8


def test_a_script_in_an_answer_is_text_in_html() -> None:
    for document in (HOSTILE.html(), HOSTILE._repr_html_()):
        found = Tags(document)
        allowed = {"html", "head", "meta", "title", "body", "div", "style", "pre", "table", "tr", "th", "td", "p"}
        assert found.tags <= allowed
        assert found.attributes <= {"lang", "charset", "http-equiv", "content", "class", "dir"}
        assert found.text.count(SHOWN) >= 8
        assert "\x1b" not in document
    assert "default-src 'none'" in HOSTILE.html()
    assert HOSTILE.html().startswith("<!doctype html>")


def test_html_has_a_row_for_each_answer_and_the_distribution() -> None:
    found = Tags(run({"output_text": "a" * 100, "reward": 1.0}, {"reward": 0.5})._repr_html_())
    assert "a" * 100 in found.text, "more of an answer than a terminal has room for"
    assert "2 rewards: mean 0.75, lowest 0.5, highest 1" in found.text


ANSWERS: st.SearchStrategy[dict[str, Any]] = st.builds(
    dict,
    output_text=st.text(max_size=80),
    reward=st.none() | st.floats(allow_nan=False, allow_infinity=False),
    parts=st.dictionaries(st.text(max_size=8), st.none() | st.floats(allow_nan=False), max_size=2),
    printed=st.text(max_size=20),
    failure=st.none() | st.builds(dict, code=st.text(max_size=8), message=st.text(max_size=40)),
)


@given(st.lists(ANSWERS, max_size=20), st.text(max_size=20))
def test_whatever_an_answer_holds_it_is_shown_and_nothing_more(answers: list[dict[str, Any]], words: str) -> None:
    one = run(*answers, prompts=[{"index": 0, "text": words, "item": {words: words}}])
    shown = one.text(color=False)
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\ud800-\udfff]", shown)
    assert Tags(one.html()).attributes <= {"lang", "charset", "http-equiv", "content", "class", "dir"}


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=30))
def test_every_reward_is_in_one_bar(rewards: list[float]) -> None:
    found = bins(rewards, min(rewards), max(rewards))
    assert sum(count for _, count in found) == len(rewards)
    assert len(found) <= 8
    assert len(found) == min(8, len(set(rewards)))


def test_print_shows_the_text() -> None:
    one = run({"reward": 1.0})
    assert str(one) == one.text(color=False), "the standard output of tests is no terminal"
    assert "\x1b[1menv_1: 1 answer\x1b[0m" in one.text(color=True)
