"""The command line of `finery-service`: what it refuses before anything starts."""

from __future__ import annotations

import pytest

from finery_service.main import main


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        ("--port", "65536", "from 0 to 65535, found '65536'"),
        ("--port", "-1", "from 0 to 65535, found '-1'"),
        ("--slots", "0", "from 1 to 1024, found '0'"),
        ("--slots", "two", "from 1 to 1024, found 'two'"),
    ],
)
def test_up_refuses_a_number_out_of_range(
    option: str, value: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as done:
        main(["up", f"{option}={value}"])
    assert done.value.code == 2
    assert f"argument {option}: expected a whole number {expected}" in capsys.readouterr().err
