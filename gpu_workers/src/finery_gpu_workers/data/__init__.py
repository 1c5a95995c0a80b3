"""From uploaded rows to packed updates."""
