from __future__ import annotations

import pytest

from finery.types.urls import base_url


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("https://judge.example/v1", "https://judge.example/v1"),
        ("HTTPS://Judge.Example:443/v1/", "https://judge.example/v1"),
        ("http://judge.example:80", "http://judge.example"),
        ("http://judge.example:443//", "http://judge.example:443"),
        ("http://[::1]:8000/V1", "http://[::1]:8000/V1"),
        ("http://10.0.0.7:8000", "http://10.0.0.7:8000"),
    ],
)
def test_one_address_has_one_spelling(text: str, same: str) -> None:
    assert base_url(text) == same
    assert base_url(same) == same


@pytest.mark.parametrize(
    "text",
    [
        "",
        "judge.example/v1",
        "ftp://judge.example",
        "file:///etc/passwd",
        "https://",
        "https://user:secret@judge.example/v1",
        "https://user@judge.example",
        "https://judge.example/v1?key=1",
        "https://judge.example/v1#x",
        "https://judge.example/v1?",
        "https://judge.example/a/../b",
        "https://judge.example:99999",
        "https://judge.example:port",
        "https://[::1",
        "https://judge.example\\@evil.example",
        "https://judge .example",
        "https://judge.example/\nHost: x",
        "https://jüdge.example",
    ],
)
def test_what_is_no_plain_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        base_url(text)
