"""A checkpoint on a real server, for the tests of downloads."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from pathlib import Path
from urllib.parse import unquote

from .support import Handler, HttpServer, Seen, checkpoint_json

FILES = {
    "adapter_config.json": b'{"r": 16}',
    "adapter_model.safetensors": bytes(range(256)) * 4000,
    "sub dir/ä.txt": "grüße".encode(),
    "empty": b"",
}
BIG = "adapter_model.safetensors"
SIZE = len(FILES[BIG])
SHA12 = hashlib.sha256(FILES[BIG]).hexdigest()[:12]
PARTIAL = f".{BIG}.{SHA12}.part"
Send = Callable[[Handler, bytes, int], None]


def first_byte(seen: Seen) -> int:
    found = re.fullmatch(r"bytes=(\d+)-", seen.headers.get("range", "bytes=0-"))
    assert found, seen.headers
    return int(found[1])


def wanted(seen: Seen, size: int) -> tuple[int, int]:
    """First byte and the one behind the last that a request asks for."""
    found = re.fullmatch(r"bytes=(\d+)-(\d*)", seen.headers.get("range", "bytes=0-"))
    assert found, seen.headers
    return int(found[1]), int(found[2]) + 1 if found[2] else size


def send_rest(handler: Handler, content: bytes, start: int) -> None:
    if start == 0:
        return handler.whole(200, content)
    where = f"bytes {start}-{len(content) - 1}/{len(content)}"
    return handler.whole(206, content[start:], **{"Content-Range": where})


def send_range(handler: Handler, content: bytes, start: int, end: int) -> None:
    where = f"bytes {start}-{end - 1}/{len(content)}"
    return handler.whole(206, content[start:end], **{"Content-Range": where})


def store(files: dict[str, bytes] = FILES, send: Send = send_rest) -> Callable[[Handler, Seen], None]:
    def reply(handler: Handler, seen: Seen) -> None:
        prefix = "/v1/checkpoints/ckpt_1"
        if seen.path == prefix:
            return handler.json(200, checkpoint_json(files))
        content = files[unquote(seen.path.removeprefix(f"{prefix}/files/"))]
        return send(handler, content, first_byte(seen))

    return reply


def fetches(server: HttpServer, name: str = BIG) -> list[int]:
    return [first_byte(seen) for seen in server.seen if seen.path.endswith(f"/files/{name}")]


def on_disk(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
