"""Objects of which a row says that they are owed to nobody any more."""

from __future__ import annotations

import obstore
from obstore.store import ObjectStore


async def delete_below(store: ObjectStore, prefix: str) -> None:
    """Deletes everything in the folder `prefix`, and nothing beside it."""
    folder = prefix.rstrip("/") + "/"
    async for batch in obstore.list(store, folder):
        await obstore.delete_async(store, [item["path"] for item in batch if item["path"].startswith(folder)])
