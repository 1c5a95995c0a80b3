"""`python -m finery_service.openapi_file docs/openapi.json`: the OpenAPI page as a file, without a server."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from obstore.store import MemoryStore

from finery_service.app import create_app
from finery_service.db.engine import create_engine
from finery_service.settings import Settings


def page() -> str:
    """The page that `/openapi.json` answers with, two spaces deep and with an end of line."""
    engine = create_engine("postgresql://nobody@127.0.0.1/none")  # it connects when asked, and nobody asks
    app = create_app(Settings(), app_engine=engine, system_engine=engine, store=MemoryStore())
    return json.dumps(app.openapi(), indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page(), encoding="utf-8")
