"""Texts of graders with places to fill in."""

from __future__ import annotations

from typing import Any

import pytest

from finery.templates import MissingFieldError, TemplateError, parse, render

ITEM: dict[str, Any] = {
    "answer": "42",
    "n": 1.5,
    "none": None,
    "yes": True,
    "inner": {"a-b": "é", "list": ["x", {"y": 2}], "0": "zero"},
    "code": "{{ sample.output_text }} {% x %}",
}
SAMPLE = {"output_text": "so: 42"}


@pytest.mark.parametrize(
    ("text", "filled"),
    [
        ("", ""),
        ("as it is", "as it is"),
        ("{{ item.answer }}", "42"),
        ("{{item.answer}}={{ sample.output_text }}!", "42=so: 42!"),
        ("{{ item.n }} {{ item.none }} {{ item.yes }}", "1.5 null true"),
        ("{{ item.inner.a-b }}{{ item.inner.list[0] }}{{ item.inner.list.1.y }}{{ item.inner.0 }}", "éx2zero"),
        ("{{ item.inner.list }}", '["x", {"y": 2}]'),
        ('{"a": {"b": 1}} {% if %} {# no #} }}', '{"a": {"b": 1}} {% if %} {# no #} }}'),
        ("{{ item.code }}", "{{ sample.output_text }} {% x %}"),
    ],
)
def test_places_are_filled_in_once_and_the_rest_stays(text: str, filled: str) -> None:
    assert render(parse(text), ITEM, SAMPLE) == filled


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a {{ item.x", r"expected '}}' after '{{' at character 3"),
        ("{{ }}", "expected a field as in"),
        ("{{ 7 * 7 }}", "found '7 \\* 7' at character 1"),
        ("{{ item.__class__() }}", "expected a field as in"),
        ("{{ item['x'] }}", "expected a field as in"),
        ("{{ item }}", "expected a field of item"),
        ("{{ config.x }}", "expected item .* or sample"),
        ("{{ sample.output_json }}", "expected sample.output_text"),
        ("{{ sample.output_text.x }}", "expected sample.output_text"),
        ("{{ item.x | upper }}", "expected a field as in"),
        ("{{ item.x }}" * 257, "at most 256 places"),
    ],
)
def test_what_is_no_template_is_refused_with_its_place(text: str, message: str) -> None:
    with pytest.raises(TemplateError, match=message):
        parse(text)


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("{{ item.missing }}", "item.missing"),
        ("{{ item.inner.list[2] }}", "item.inner.list[2]"),
        ("{{ item.answer.length }}", "item.answer.length"),
        ("{{ item.__class__ }}", "item.__class__"),
        ("{{ item.none.x }}", "item.none.x"),
    ],
)
def test_what_the_row_has_not_got_is_named(text: str, path: str) -> None:
    with pytest.raises(MissingFieldError) as caught:
        render(parse(text), ITEM, SAMPLE)
    assert caught.value.path == path
