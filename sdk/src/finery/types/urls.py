"""Addresses of servers, in one spelling, so that two that mean the same are the same text."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, StringConstraints

_PORTS = {"http": 80, "https": 443}


def base_url(text: str) -> str:
    """`text` with scheme and host in small letters, without the scheme's own port, without a slash at the end.

    Raises ValueError for what is no http or https address, and for user names, queries and fragments in it.
    """
    if not text.isascii() or not text.isprintable() or " " in text or "\\" in text:
        raise ValueError("expected an address of printable ASCII characters without spaces, found others")
    try:
        parts = urlsplit(text)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ValueError(f"expected an http or https address, found one that cannot be read ({error})") from None
    if parts.scheme not in _PORTS or not host:
        raise ValueError("expected an http or https address, as in https://judge.example/v1, found another text")
    if "@" in parts.netloc:
        raise ValueError("expected an address without a user name or password, found one; the operator has the key")
    if "?" in text or "#" in text:
        raise ValueError("expected an address without ? and #, found one with them")
    if any(step in (".", "..") for step in parts.path.split("/")):
        raise ValueError("expected an address without . and .. in its path, found one with them")
    shown = f"[{host}]" if ":" in host else host
    where = shown if port in (None, _PORTS[parts.scheme]) else f"{shown}:{port}"
    return f"{parts.scheme}://{where}{parts.path.rstrip('/')}"


BaseUrl = Annotated[str, StringConstraints(min_length=1, max_length=512), AfterValidator(base_url)]
"""Of an http or https server, always in the spelling of `base_url`."""
