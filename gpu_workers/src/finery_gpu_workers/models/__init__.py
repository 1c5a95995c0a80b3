"""Base models: where weights come from, our decoder, adapters."""
