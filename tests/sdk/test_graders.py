"""Graders from files: read here, run elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest

import finery
from finery import InvalidArgumentError, graders

SOURCE = "def grade(sample, item):\n    return float(item['word'] in sample['output_text'])  # ä 😀\n"


def test_a_file_is_sent_as_it_is_and_not_run(tmp_path: Path) -> None:
    path = tmp_path / "reward.py"
    path.write_bytes(b"\xef\xbb\xbf" + b"raise SystemExit\r\n" + SOURCE.encode())
    made = graders.python(str(path), name="exact", timeout_seconds=3)
    assert (made.name, made.timeout_seconds) == ("exact", 3.0)
    assert made.source == "raise SystemExit\r\n" + SOURCE, "without the mark that some editors put first"
    assert finery.graders is graders


def test_as_many_characters_as_the_server_takes(tmp_path: Path) -> None:
    path = tmp_path / "reward.py"
    path.write_text("😀" * 262_144, encoding="utf-8")
    assert len(graders.python(path).source) == 262_144
    path.write_text("a" * 262_145, encoding="utf-8")
    with pytest.raises(InvalidArgumentError, match=r"reward\.py: expected at most 262,144 characters, found more"):
        graders.python(path)
    path.write_text("😀" * 400_000, encoding="utf-8")
    with pytest.raises(InvalidArgumentError, match="expected at most 262,144 characters"):
        graders.python(path)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"a = 1\nb = '\xff'\n", r"reward\.py, line 2: expected UTF-8"),
        (b"", r"found an empty file"),
        (b" \n", r"found an empty file"),
    ],
)
def test_what_is_no_text_is_refused(tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "reward.py").write_bytes(content)
    with pytest.raises(InvalidArgumentError, match=said):
        graders.python(tmp_path / "reward.py")


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=r"nothing\.py: expected a Python file, found: No such file"):
        graders.python(tmp_path / "nothing.py")
    with pytest.raises(InvalidArgumentError, match="found: Is a directory"):
        graders.python(tmp_path)


@pytest.mark.parametrize(("field", "wrong"), [("timeout_seconds", 0), ("timeout_seconds", 121), ("name", "a b")])
def test_a_wrong_option_is_named(tmp_path: Path, field: str, wrong: object) -> None:
    (tmp_path / "reward.py").write_text(SOURCE, encoding="utf-8")
    with pytest.raises(InvalidArgumentError, match=f"^{field}: expected (?!Input|String)"):
        graders.python(tmp_path / "reward.py", **{field: wrong})  # type: ignore[arg-type]
