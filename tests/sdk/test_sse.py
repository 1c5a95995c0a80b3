from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from finery._sse import ServerEvent, SseParser

SENT = {"text": "a\u2028b\u2029c\x85d\x0b\x0c\x1c\x1d\x1e🔥ä\r\nend", "n": 1}


def parse(*chunks: bytes) -> list[ServerEvent]:
    parser = SseParser()
    return [event for chunk in chunks for event in parser.feed(chunk)]


def one_by_one(stream: bytes) -> list[bytes]:
    return [stream[n : n + 1] for n in range(len(stream))]


@pytest.mark.parametrize("end", ["\n", "\r", "\r\n"])
@pytest.mark.parametrize("bom", [b"", b"\xef\xbb\xbf"])
def test_e08_one_event_in_one_byte_chunks_is_what_was_sent(end: str, bom: bytes) -> None:
    data = json.dumps(SENT, ensure_ascii=False)
    stream = bom + end.join([": hello", "id: 7", "event: metric", f"data: {data}", "", ""]).encode()
    for chunks in (one_by_one(stream), [stream]):
        (event,) = parse(*chunks)
        assert (event.type, event.id) == ("metric", "7")
        assert json.loads(event.data) == SENT
        assert "\ufffd" not in event.data


def test_e08_an_event_is_out_with_its_last_byte_even_if_a_line_feed_may_follow() -> None:
    parser = SseParser()
    assert parser.feed(b"data: 1\r") == []
    assert parser.feed(b"\n") == []
    assert [event.data for event in parser.feed(b"\r")] == ["1"]
    assert parser.feed(b"\ndata: 2\n") == []
    assert [event.data for event in parser.feed(b"\n")] == ["2"]


def test_data_lines_are_joined_and_fields_read_as_the_norm_says() -> None:
    stream = b"data: a\ndata:b\ndata\ndata:  c\nnonsense: x\nretry: 10\nid: 1\n\ndata: next\n\n"
    assert parse(stream) == [ServerEvent("message", "a\nb\n\n c", "1"), ServerEvent("message", "next", "1")]


def test_no_data_no_event_and_its_type_is_forgotten() -> None:
    assert parse(b"event: lost\n\ndata: a\n\n: beat\n\n\n") == [ServerEvent("message", "a", "")]


def test_an_id_with_nul_is_ignored_and_an_empty_one_clears() -> None:
    assert [e.id for e in parse(b"id: 1\ndata: a\n\nid: 2\x00\ndata: b\n\nid\ndata: c\n\n")] == ["1", "1", ""]


def test_an_event_without_its_blank_line_is_dropped() -> None:
    assert parse(b"data: a\n\ndata: cut of") == [ServerEvent("message", "a", "")]


def test_a_bom_counts_only_at_the_start() -> None:
    assert parse(b"data: a\n\n\xef\xbb\xbfdata: b\n\n") == [ServerEvent("message", "a", "")]


pieces = st.sampled_from(
    [b"data", b"event", b"id", b":", b" ", b"\r", b"\n", b"\r\n", "ä🔥\u2028".encode(), b"x", b"\0"]
)


@settings(deadline=None)
@given(st.lists(pieces, max_size=40), st.data())
def test_e08_where_the_chunks_are_cut_never_matters(parts: list[bytes], data: st.DataObject) -> None:
    stream = b"".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    chunks = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    assert parse(*chunks) == parse(stream)


@settings(deadline=None)
@given(st.text(st.characters(codec="utf-8", exclude_characters="\r\n"), min_size=1))
def test_e08_any_text_without_line_ends_arrives_unchanged(text: str) -> None:
    (event,) = parse(*one_by_one(f"data: {text}\n\n".encode()))
    assert event.data == text
