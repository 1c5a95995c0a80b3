"""Stop texts: found with the token that completes them, however they are cut into tokens."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from finery_gpu_workers.rollout.stops import StopTexts
from finery_testing.tiny import EOS, byte_tokenizer

TOKENIZER = byte_tokenizer()


def text_of(tokens: Sequence[int]) -> str:
    text: str = TOKENIZER.decode(list(tokens), skip_special_tokens=True)
    return text


def stop_at(tokens: Sequence[int], *texts: str) -> int | None:
    """How many tokens there are when it stops."""
    stops = StopTexts(texts, text_of)
    return next((n for n in range(1, len(tokens) + 1) if stops.completed_by(tokens[:n])), None)


@pytest.mark.parametrize(
    ("text", "stops", "expected"),
    [
        ("one END two", ("END",), 7),
        ("one END two", ("two", "END"), 7),
        ("ENENEND", ("END",), 7),
        ("EN D", ("END",), None),
        ("END", ("END",), 3),
        ("a\n\nb", ("\n\n",), 3),
        ("né—x", ("—",), 6),
        ("né—x", ("é—",), 6),
        ("\U0001f600", ("\U0001f600",), 4),
        ("anything", (), None),
    ],
)
def test_a_text_is_found_with_the_token_that_completes_it(
    text: str, stops: tuple[str, ...], expected: int | None
) -> None:
    assert stop_at(list(text.encode()), *stops) == expected


def test_special_tokens_between_do_not_hide_a_text() -> None:
    assert stop_at([*b"E", EOS, *b"N", EOS, EOS, *b"D!"], "END") == 6


def test_bytes_that_are_no_text_do_not_hide_one() -> None:
    assert stop_at([0x80] * 100 + [0xE2, 0x80] + list(b"END"), "END") == 105
    assert stop_at([0x80] * 100 + list("…".encode()), "…") == 103


def test_a_token_costs_a_window_and_not_the_answer() -> None:
    seen: list[int] = []

    def counting(tokens: Sequence[int]) -> str:
        seen.append(len(tokens))
        return text_of(tokens)

    stops, tokens = StopTexts(("STOP",), counting), list(b"a word and " * 200 + b"STOP")
    assert [n for n in range(1, len(tokens) + 1) if stops.completed_by(tokens[:n])] == [len(tokens)]
    assert max(seen) <= 32
    assert len(seen) < 1.2 * len(tokens)


@given(
    st.text(alphabet="ab—\U0001f600 ", max_size=120).map(lambda text: list(text.encode())),
    st.lists(st.text(alphabet="ab—\U0001f600 ", min_size=1, max_size=5), min_size=1, max_size=3),
    st.data(),
)
def test_a_window_finds_what_the_whole_text_has(tokens: list[int], stops: list[str], data: st.DataObject) -> None:
    for place in data.draw(st.lists(st.integers(0, len(tokens)), max_size=8)):
        tokens.insert(place, data.draw(st.sampled_from([EOS, 0x80, 0xE2, 0xF0])))
    whole = (n for n in range(1, len(tokens) + 1) if any(one in text_of(tokens[:n]) for one in stops))
    assert stop_at(tokens, *stops) == next(whole, None)
