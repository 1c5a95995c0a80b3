"""Uniform random numbers by place instead of by turn: number `position` of stream `seed`, whatever was drawn before."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)
_ROUNDS = 10

Words = NDArray[np.uint64]
"""Of 32 bits each, kept in 64 so that products fit."""


def uniforms(seeds: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """One number in [0, 1) of 53 bits per (seed, position), both [n]; the same on every machine."""
    counter = positions.astype(np.uint64)
    zero = np.zeros_like(counter)
    one, other, _, _ = philox((counter & _LOW, counter >> _HALF, zero, zero), (seeds & _LOW, seeds >> _HALF))
    return ((one >> np.uint64(5)) * 2.0**26 + (other >> np.uint64(6))) * 2.0**-53


def philox(counter: tuple[Words, Words, Words, Words], key: tuple[Words, Words]) -> tuple[Words, Words, Words, Words]:
    """Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"), vectorised."""
    a, b, c, d = counter
    left, right = key
    for _ in range(_ROUNDS):
        one, two = a * _MULTIPLIERS[0], c * _MULTIPLIERS[1]
        a, b, c, d = (two >> _HALF) ^ b ^ left, two & _LOW, (one >> _HALF) ^ d ^ right, one & _LOW
        left, right = (left + _WEYL[0]) & _LOW, (right + _WEYL[1]) & _LOW
    return a, b, c, d
