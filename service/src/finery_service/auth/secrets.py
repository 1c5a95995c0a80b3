"""API keys: a prefix, 32 base32 characters of 160 random bits, 6 characters of checksum.

`fny_…` belongs to a tenant, `fop_…` to an operator. The checksum lets a typo, or a scanner's false alarm, be told
from a key without asking the database. At rest there is only the sha256 of the whole secret: with 160 random bits
there is nothing to guess, so a slow hash would protect nothing.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from typing import Literal

KeyPrefix = Literal["fny", "fop"]

_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"  # Crockford: no i, l, o, u
_SHAPE = re.compile(rb"(fny|fop)_[0-9a-hjkmnp-tv-z]{38}")
_SHOWN = 10


def new_secret(prefix: KeyPrefix) -> str:
    """A fresh key. Whoever makes it shows it once and stores `digest` and `shown_prefix` of it."""
    body = f"{prefix}_{_base32(secrets.randbits(160), 32)}"
    return body + _checksum(body)


def digest(secret: str | bytes) -> bytes:
    """What is stored and looked up: sha256 of the key's bytes."""
    return hashlib.sha256(secret.encode() if isinstance(secret, str) else secret).digest()


def shown_prefix(secret: str) -> str:
    """The part that may be shown, to tell keys apart: `fny_` and 6 of the 32 random characters."""
    return secret[:_SHOWN]


def well_formed(secret: bytes) -> bool:
    """Whether `secret` has the shape and the checksum of a key; any bytes may be passed."""
    if not _SHAPE.fullmatch(secret):
        return False
    text = secret.decode("ascii")
    return text[-6:] == _checksum(text[:-6])


def _checksum(body: str) -> str:
    return _base32(int.from_bytes(hashlib.sha256(body.encode()).digest()[:4], "big") >> 2, 6)


def _base32(number: int, length: int) -> str:
    return "".join(_ALPHABET[(number >> (5 * place)) & 31] for place in reversed(range(length)))
