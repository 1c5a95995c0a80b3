"""Ids: a prefix, then 36 base32 characters of 48 bits of milliseconds and 128 random bits.

They sort by creation time, hold no slash, and cannot be guessed.
"""

from __future__ import annotations

import secrets
from typing import Annotated, Literal

from pydantic import StringConstraints

Prefix = Literal["ten", "proj", "key", "file", "mdl", "job", "att", "ckpt", "env", "prev", "erun", "req", "pb"]

_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"  # Crockford: no i, l, o, u
_LENGTH = 36  # ceil((48 + 128) / 5)


def new_id(prefix: Prefix, now_ms: int, random_bits: int | None = None) -> str:
    """A fresh id. `now_ms` comes from the caller's clock; `random_bits` (128) only tests pass."""
    random = secrets.randbits(128) if random_bits is None else random_bits
    number = (now_ms & ((1 << 48) - 1)) << 128 | random
    digits = (_ALPHABET[(number >> (5 * place)) & 31] for place in reversed(range(_LENGTH)))
    return f"{prefix}_{''.join(digits)}"


def _id(prefix: Prefix) -> StringConstraints:
    return StringConstraints(pattern=rf"^{prefix}_[0-9a-zA-Z_-]{{1,64}}$")


TenantId = Annotated[str, _id("ten")]
ProjectId = Annotated[str, _id("proj")]
KeyId = Annotated[str, _id("key")]
FileId = Annotated[str, _id("file")]
ModelId = Annotated[str, _id("mdl")]
JobId = Annotated[str, _id("job")]
AttemptId = Annotated[str, _id("att")]
CheckpointId = Annotated[str, _id("ckpt")]
EnvironmentId = Annotated[str, _id("env")]
