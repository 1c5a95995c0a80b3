"""Rows of a parquet file, a few at a time: a row group is streamed, so that its size costs no memory.

Needs pyarrow (extra `parquet`), imported when a file is read. What a page or a value of a hostile file may cost is not
bounded here: who reads foreign files does so in a process with a limit on its memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from finery.data.strict_json import StrictReader, dotted, printable
from finery.types.errors import Problem

MAX_ROW_BYTES = 16 * 2**20
"""As Arrow holds it; the same as a line of JSONL may have."""
MAX_FOOTER_BYTES = 32 * 2**20
_JSON_TEXT = ("messages", "tools")
"""Columns that are parsed if they are text."""
_ANSWERS = ("chosen", "rejected")
"""As `completion` does, they tell a row from a prompt also where they are null."""
_BATCH_BYTES = 8 * 2**20
_BATCH_ROWS = 1024
_BUFFER = 2**20
_MAGIC, _ENCRYPTED = b"PAR1", b"PARE"
_WRITE_ANEW = "Write the file anew; a table that pandas, polars or datasets wrote with their defaults is fine."


def is_parquet(head: bytes) -> bool:
    """From a file's first four bytes; neither its name nor what its sender says of it counts."""
    return head[:4] in (_MAGIC, _ENCRYPTED)


def rows(path: Path) -> Iterator[tuple[int, Any | Problem]]:
    """(number from 1, row as `read_row` takes it, or what is wrong with it).

    The number is 0 where the file as a whole is meant; a file or page that cannot be read is the last thing yielded.
    Raises ImportError without pyarrow, OSError if the file cannot be opened, and MemoryError.
    """
    file = _open(path)
    if isinstance(file, Problem):
        yield 0, file
        return
    with file:
        yield from _rows(file)


def count(path: Path) -> int:
    """Rows as the file's footer has it; 0 if it cannot be read. Raises as `rows` does."""
    file = _open(path)
    if isinstance(file, Problem):
        return 0
    with file:
        return int(file.metadata.num_rows)


def _open(path: Path) -> Any | Problem:
    with path.open("rb") as raw:
        size = raw.seek(0, 2)
        raw.seek(max(0, size - 8))
        tail = raw.read(8)
    if tail[4:] == _ENCRYPTED:
        return _encrypted()
    length = int.from_bytes(tail[:4], "little")
    if tail[4:] != _MAGIC or length + 12 > size:
        return _broken("expected the end of a parquet file, found other bytes: it is cut short", _WRITE_ANEW)
    if length > MAX_FOOTER_BYTES:
        message = f"expected a footer of at most {MAX_FOOTER_BYTES} bytes, found {length}"
        return _broken(message, "Write fewer columns and larger row groups.")
    try:
        import pyarrow.parquet
    except ImportError:
        raise ImportError("Reading parquet needs pyarrow: pip install 'finery[parquet]'.") from None
    try:
        # A buffer makes it read page by page instead of whole column chunks.
        return pyarrow.parquet.ParquetFile(path, buffer_size=_BUFFER, pre_buffer=False, memory_map=False)
    except MemoryError:
        raise
    except Exception as error:  # pyarrow raises many kinds, TypeError and OverflowError among them
        return _unreadable(error)


def _rows(file: Any) -> Iterator[tuple[int, Any | Problem]]:
    from finery.data.columns import schema_problem, wanted

    number = 0
    try:
        if not file.metadata.num_rows:
            yield 0, Problem(code="empty_file", message="expected at least one row, found none", hint="Add rows.")
            return
        prompts = _are_prompts(file)
        if problem := schema_problem(file.schema_arrow, prompts=prompts):
            yield 0, problem
            return
        for batch in _batches(file, wanted(file.schema_arrow.names, prompts=prompts)):
            for value in _values(batch):
                number += 1
                yield number, value
    except MemoryError:
        raise
    except Exception as error:
        yield number + 1 if number else 0, _unreadable(error)
    else:
        if number != file.metadata.num_rows:
            yield number, _broken(f"expected {file.metadata.num_rows} rows, found {number}", _WRITE_ANEW)


def _are_prompts(file: Any) -> bool:
    """Whether the rows are prompts: then graders want to know all columns, otherwise most are nobody's business."""
    from finery.data.columns import may_be_prompts
    from finery.data.prompts import is_open

    names = file.schema_arrow.names
    if not may_be_prompts(names):
        return False
    if "prompt" in names:
        return True
    others = dict.fromkeys(names)
    found = (value for batch in _batches(file, ["messages"]) for value in _values(batch))
    first = next((value for value in found if isinstance(value, dict) and value.get("messages")), None)
    return first is not None and is_open(others | first)


def _batches(file: Any, names: list[str]) -> Iterator[Any]:
    return iter(file.iter_batches(_batch_rows(file.metadata), columns=names, use_threads=False))


def _batch_rows(metadata: Any) -> int:
    groups = [metadata.row_group(n) for n in range(metadata.num_row_groups)]
    largest = max((group.total_byte_size / max(1, group.num_rows) for group in groups), default=0)
    return max(1, min(_BATCH_ROWS, int(_BATCH_BYTES / max(1.0, largest))))


def _values(batch: Any) -> Iterator[Any | Problem]:
    """Whole batches are fast; one with a row that is too long or is no text is read row by row."""
    from finery.data.columns import values

    names = batch.schema.names
    if batch.nbytes <= MAX_ROW_BYTES:
        try:
            columns = [values(column) for column in batch.columns]
        except UnicodeDecodeError:
            pass
        else:
            for row in zip(*columns, strict=True):
                yield _row(names, row)
            return
    for n in range(len(batch)):
        row = batch.slice(n, 1)
        if row.nbytes > MAX_ROW_BYTES:
            message = f"expected a row of at most {MAX_ROW_BYTES} bytes, found {row.nbytes}"
            yield Problem(code="line_too_long", message=message, hint="Split the row.")
            continue
        try:
            yield _row(names, [values(column)[0] for column in row.columns])
        except UnicodeDecodeError as error:
            message = f"expected UTF-8, found the byte 0x{error.object[error.start]:02X}"
            yield Problem(code="invalid_utf8", message=message, hint="Write texts as UTF-8.")


def _row(names: list[str], row: Any) -> dict[str, Any] | Problem:
    found = {name: value for name, value in zip(names, row, strict=True) if value is not None}
    for name in set(_ANSWERS if "messages" in found else (*_ANSWERS, "completion")).intersection(names):
        found.setdefault(name, None)
    for name in _JSON_TEXT:
        if isinstance(found.get(name), str):
            try:
                found[name], flaws = StrictReader().read(found[name])
            except ValueError as error:
                message = f"expected JSON text: {error}"[:300]
                return Problem(
                    code="invalid_json", path=name, message=message, hint="Write the column with json.dumps."
                )
            if flaws:
                path = dotted((name, *flaws[0].path))
                return Problem(code=flaws[0].code, path=path, message=flaws[0].message, hint="Mend the value.")
    return found


def _unreadable(error: Exception) -> Problem:
    text = printable(" ".join(str(error).split()), 250)
    if "ncrypt" in text or "decrypt" in text:
        return _encrypted()
    return _broken(f"expected a parquet file, found one that cannot be read: {text}", _WRITE_ANEW)


def _encrypted() -> Problem:
    message = "expected a parquet file that anyone can read, found an encrypted one"
    return Problem(code="encrypted_parquet", message=message, hint="Write it without encryption.")


def _broken(message: str, hint: str) -> Problem:
    return Problem(code="invalid_parquet", message=message, hint=hint)
