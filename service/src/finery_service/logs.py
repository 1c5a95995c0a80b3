"""One JSON object a line on stderr, from structlog and from the standard library alike; secrets are blotted out."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import MutableMapping
from typing import Any

import structlog

_SECRET_NAMES = re.compile(r"(^|_)(password|secret|token|dsn|api_key|authorization|cookie)$", re.IGNORECASE)
_SECRET_TEXTS = re.compile(
    r"(?P<key>f(?:ny|op)_[0-9a-z]{4})[0-9a-z]{8,}"
    r"|(?P<url>[a-z][a-z0-9+.-]*://[^:/@\s\"]*):[^@\s\"]+@"
    r"|(?P<bearer>[Bb]earer\s+)[A-Za-z0-9._~+/=-]{8,}"
)


def redact_text(text: str) -> str:
    """Blot out our API keys (a short prefix stays), passwords in URLs, and bearer tokens."""

    def blot(match: re.Match[str]) -> str:
        if match["key"]:
            return f"{match['key']}…"
        return f"{match['url']}:…@" if match["url"] else f"{match['bearer']}…"

    return _SECRET_TEXTS.sub(blot, text)


def redact_fields(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """A structlog processor: fields whose name says that they are secret lose their value."""
    for name, value in event.items():
        if isinstance(value, str | bytes) and _SECRET_NAMES.search(name):
            event[name] = "…"
    return event


def _render(logger: Any, method: str, event: MutableMapping[str, Any]) -> str:
    line = structlog.processors.JSONRenderer(ensure_ascii=False, default=str)(logger, method, event)
    return redact_text(line if isinstance(line, str) else line.decode())


def configure(process: str, level: int = logging.INFO) -> None:
    """Once, at the start of a process; `process` is in every line."""

    def name_process(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        event["process"] = process
        return event

    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        name_process,
    ]
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=[*shared, structlog.stdlib.ExtraAdder()],
        processors=[
            structlog.stdlib.ProcessorFormatter.remove_processors_meta,
            structlog.processors.format_exc_info,
            redact_fields,
            _render,
        ],
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    logging.basicConfig(handlers=[handler], level=level, force=True)
