from __future__ import annotations

from hypothesis import settings

settings.register_profile("finery", deadline=None, derandomize=True)
settings.load_profile("finery")
