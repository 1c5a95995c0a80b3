"""Attempt tokens: derived from the worker secret, so that neither side has to store them."""

from __future__ import annotations

import hashlib
import hmac

_SCHEME = "Bearer "


def attempt_token(secret: str, attempt: str, fence: int) -> str:
    """hex HMAC-SHA256(secret, "attempt:fence")"""
    return hmac.new(secret.encode(), f"{attempt}:{fence}".encode(), hashlib.sha256).hexdigest()


def authentic(authorization: str | bytes | None, secret: str, attempt: str, fence: int) -> bool:
    """Whether the `authorization` metadata carries this attempt's token; constant time."""
    found = authorization.encode() if isinstance(authorization, str) else authorization or b""
    expected = (_SCHEME + attempt_token(secret, attempt, fence)).encode()
    return hmac.compare_digest(found, expected)
