from __future__ import annotations

import io
import sys
from types import ModuleType

import pytest
from rich.console import Console

from finery.cli import main, output, report
from finery.errors import BadRequestError
from finery.types.data import Warning as DataWarning
from finery.types.jobs import Job

from .support import job_json

ID = "job_00d25pxjfkahz3rkjpxq7gae1abka87sgym5"


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """A terminal of 40 columns, narrower than one id, for both streams."""
    written = io.StringIO()
    console = Console(file=written, width=40, soft_wrap=True)
    for module in (output, report):
        monkeypatch.setattr(module, "out", console)
        monkeypatch.setattr(module, "err", console)
    return written


def test_a_table_has_one_row_a_line_and_cuts_nothing_on_a_narrow_terminal(screen: io.StringIO) -> None:
    output.print_table(("id", "name", "state"), [(ID, "größer 模型 [bold]", "running"), (ID, None, "queued")])
    lines = [line.rstrip() for line in screen.getvalue().splitlines()]
    assert [line.split("  ")[0] for line in lines[1:]] == [ID, ID]
    assert lines[1].endswith("größer 模型 [bold]  running")
    assert lines[2].endswith("–                   queued")


def test_an_empty_table_is_its_header(screen: io.StringIO) -> None:
    output.print_table(("id", "name"), [])
    assert screen.getvalue().split() == ["id", "name"]


def test_an_error_with_one_detail_is_said_once(screen: io.StringIO) -> None:
    said = "method: expected this field, found nothing."
    detail = {"param": "method", "code": "missing_field", "message": said}
    output.print_error(BadRequestError(said, code="missing_field", param="method", details=[detail]))
    assert screen.getvalue().splitlines() == [f"Error: {said}"]


def test_of_several_details_the_one_in_the_message_is_not_repeated(screen: io.StringIO) -> None:
    details = [{"message": f"{name}: expected this field, found nothing."} for name in ("method", "model")]
    said = f"{details[0]['message']} (1 more in details.)"
    output.print_error(BadRequestError(said, code="missing_field", details=details))
    assert screen.getvalue().splitlines() == [f"Error: {said}", f"  {details[1]['message']}"]


def test_a_warning_names_its_field_once_and_the_first_lines(screen: io.StringIO) -> None:
    said = "validation_file: 40 rows are in the training file too."
    details = [{"rows": 40, "lines": list(range(1, 41))}]
    warning = DataWarning(code="validation_overlap", message=said, param="validation_file", details=details)
    report.print_warning(warning)
    lines = [f"Warning: {said}", "  rows 40  lines 1, 2, 3, 4, 5, 6, 7, 8, 9, 10 and 30 more"]
    assert screen.getvalue().splitlines() == lines


def test_a_wrong_row_reads_as_sentences() -> None:
    item = {"message": "expected user, found 'usr'", "hint": "Rename the role."}
    assert output.problem(3, "messages[0].role", item) == (
        "line 3 messages[0].role: expected user, found 'usr'. Rename the role."
    )
    assert output.problem(None, "seed", {"message": "seed: expected 1, found 2."}) == "seed: expected 1, found 2."


@pytest.mark.parametrize(
    ("intent", "state", "more"),
    [
        ("cancel", "running", ", to be cancelled"),
        ("cancel", "cancelled", ""),
        ("pause", "running", ", to be paused"),
        ("pause", "paused", ""),
        ("run", "running", ""),
    ],
)
def test_a_job_that_is_to_change_says_so_until_it_has(screen: io.StringIO, intent: str, state: str, more: str) -> None:
    report.print_job(Job.model_validate(job_json(state=state, intent=intent)), as_json=False)
    assert f"state    {state}{more}" in [line.rstrip() for line in screen.getvalue().splitlines()]


def test_ctrl_c_before_the_command_is_loaded_ends_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted(ModuleType):
        def __getattr__(self, name: str) -> object:
            raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "finery.cli.app", Interrupted("finery.cli.app"))
    with pytest.raises(SystemExit) as done:
        main(["jobs", "list"])
    assert done.value.code == 130


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.0002, "0.0002"),
        (8.577e-05, "8.577e-05"),
        (3.14159, "3.142"),
        (12_250.4, "12,250"),
        (-1500.0, "-1,500"),
        (7, "7"),
        (None, "–"),
    ],
)
def test_numbers_are_short_and_large_ones_are_no_powers_of_ten(value: float | None, shown: str) -> None:
    assert output.number(value) == shown
