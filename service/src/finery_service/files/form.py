"""The form of `POST /v1/files`: one `file`, optional `name`, `project` and `purpose`, in any order."""

from __future__ import annotations

import unicodedata
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

from finery.data.strict_json import printable
from finery_service.errors import ServiceError
from finery_service.files.intake import Received
from finery_service.http.multipart import Multipart, Part

MAX_NAME_BYTES = 255
_FIELDS = ("name", "project", "purpose")

Take = Callable[[AsyncIterator[bytes]], Awaitable[Received]]


@dataclass
class Form:
    fields: dict[str, str] = field(default_factory=dict)
    filename: str | None = None
    received: Received | None = None

    @property
    def name(self) -> str:
        """The file's display name. Raises 400 for a name that cannot be kept as it is."""
        param = "name" if "name" in self.fields else "file"
        return checked_name(self.fields.get("name", self.filename or ""), param)


async def read_form(multipart: Multipart, form: Form, take: Take, limit: int) -> None:
    """Fills `form`, so that its caller knows what was stored even if a later part is refused.

    `take` stores the file's bytes; `limit` is for text fields. Raises 400 and 413 naming the field.
    """
    unknown: list[str] = []
    async for part in multipart.parts():
        if part.name == "file":
            await _read_file(multipart, form, part, take)
            continue
        text = await multipart.text(part, limit)
        if part.name not in _FIELDS:
            unknown.append(printable(part.name))
        elif part.name in form.fields:
            raise ServiceError(400, "duplicate_field", f"Expected one field {part.name}, found two.", param=part.name)
        else:
            form.fields[part.name] = text
    if unknown:
        expected = ", ".join(("file", *_FIELDS))
        message = f"Expected the fields {expected}, found {unknown[0]}; leave it out."
        raise ServiceError(400, "unknown_field", message, param=unknown[0])
    if form.received is None:
        message = "Expected a part named file with the data, found none."
        raise ServiceError(400, "missing_file", message, param="file")


async def _read_file(multipart: Multipart, form: Form, part: Part, take: Take) -> None:
    if form.received is not None:
        raise ServiceError(400, "duplicate_field", "Expected one part file, found two.", param="file")
    if not part.filename:
        message = "Expected a filename in the part file, found none; send Content-Disposition with a filename."
        raise ServiceError(400, "missing_filename", message, param="file")
    form.filename = part.filename
    if "name" not in form.fields:
        checked_name(part.filename, "file")  # before its bytes are read
    form.received = await take(multipart.data())


def checked_name(name: str, param: str) -> str:
    """`name`, exactly as sent: it is shown, and never part of a path or key."""
    size = len(name.encode())
    if size > MAX_NAME_BYTES:
        raise _bad_name(param, f"at most {MAX_NAME_BYTES} bytes in UTF-8, found {size}")
    if not name.strip():
        raise _bad_name(param, "a name, found only spaces")
    if any(unicodedata.category(character) in ("Cc", "Zl", "Zp") for character in name):
        raise _bad_name(param, "a name without control characters, found one with some")
    return name


def _bad_name(param: str, expected: str) -> ServiceError:
    return ServiceError(400, "invalid_file_name", f"{param}: expected {expected}; rename the file.", param=param)
