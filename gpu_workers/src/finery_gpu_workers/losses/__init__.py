"""Losses: pure, shape-checked; each names its numerator and its denominator."""
