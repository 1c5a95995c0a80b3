"""Where the server is and who is calling: arguments, then environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from finery._runtime import Runtime
from finery.errors import ConfigurationError

DEFAULT_BASE_URL = "http://127.0.0.1:8700"
_LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})


@dataclass(frozen=True)
class Config:
    base_url: str
    api_key: str = field(repr=False)
    timeout: float
    """Seconds without a byte before a call counts as lost."""
    max_attempts: int
    reconnect_timeout: float
    """Seconds that event streams and downloads outlast a server that does not answer."""
    runtime: Runtime = field(repr=False)

    @property
    def loopback(self) -> bool:
        """On this machine: proxies of the environment are not for it."""
        return urlsplit(self.base_url).hostname in _LOOPBACK

    @property
    def tls(self) -> bool:
        """False where no TLS can occur, directly or to a proxy: loading the certificates takes 30 ms."""
        return not self.loopback or self.base_url.startswith("https:")


def resolve(
    api_key: str | None,
    base_url: str | None,
    *,
    environment: Mapping[str, str],
    timeout: float,
    max_retries: int,
    reconnect_timeout: float,
    runtime: Runtime,
) -> Config:
    if timeout <= 0 or max_retries < 0 or reconnect_timeout < 0:
        raise ConfigurationError("Expected timeout > 0, max_retries >= 0 and reconnect_timeout >= 0.")
    return Config(
        base_url=_base_url(base_url or environment.get("FINERY_BASE_URL") or DEFAULT_BASE_URL),
        api_key=_api_key(api_key or environment.get("FINERY_API_KEY") or ""),
        timeout=timeout,
        max_attempts=max_retries + 1,
        reconnect_timeout=reconnect_timeout,
        runtime=runtime,
    )


def _base_url(text: str) -> str:
    url = text.strip().rstrip("/")
    if "@" in url:
        raise ConfigurationError("The base URL holds a user or password; pass the key as api_key or FINERY_API_KEY.")
    wrong = ConfigurationError(
        f"Expected a base URL such as {DEFAULT_BASE_URL}, found {text!r}; pass base_url or set FINERY_BASE_URL."
    )
    try:
        parts = urlsplit(url)
        _ = parts.port  # raises if it is no port
    except ValueError:
        raise wrong from None
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise wrong
    return url


def _api_key(text: str) -> str:
    key = text.strip()
    if not key:
        raise ConfigurationError(
            "No API key: pass api_key to the client or set FINERY_API_KEY. "
            "An operator makes one with POST /v1/tenants/{tenant}/keys."
        )
    # A key with other characters would be quoted, in full, by the HTTP library's own error.
    if not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigurationError("The API key holds spaces or characters that no key has; copy it again.")
    return key
