"""Sampling: batched decoding with a cache, and what it was asked for."""
