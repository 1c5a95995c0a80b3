"""Numbers by place: Philox against the known answers of its authors, and what the sampler leans on."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from finery_gpu_workers.rollout.uniforms import Words, philox, uniforms

# Random123, tests/kat_vectors, lines `philox4x32 10`: counter, key, answer.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def word(value: int) -> Words:
    return np.array([value], dtype=np.uint64)


def numbers(seeds: list[int], positions: list[int]) -> list[float]:
    found: list[float] = uniforms(np.array(seeds, dtype=np.uint64), np.array(positions, dtype=np.int64)).tolist()
    return found


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN)
def test_philox_gives_the_known_answers(
    counter: tuple[int, int, int, int], key: tuple[int, int], answer: tuple[int, ...]
) -> None:
    a, b, c, d = map(word, counter)
    left, right = map(word, key)
    assert tuple(int(one[0]) for one in philox((a, b, c, d), (left, right))) == answer


def test_a_uniform_is_made_of_the_first_two_words() -> None:
    """Seed 0, position 0: (0x6627E8D5 >> 5) · 2⁻²⁷ + (0xE169C58D >> 6) · 2⁻⁵³."""
    assert numbers([0], [0]) == [(0x6627E8D5 >> 5) * 2.0**-27 + (0xE169C58D >> 6) * 2.0**-53]


@given(st.lists(st.tuples(st.integers(0, 2**63 - 1), st.integers(0, 2**40)), min_size=2, max_size=6, unique=True))
def test_a_number_depends_on_its_seed_and_place_only(places: list[tuple[int, int]]) -> None:
    seeds, positions = [list(one) for one in zip(*places, strict=True)]
    together = numbers(seeds, positions)
    assert together == [numbers([seed], [position])[0] for seed, position in places]
    assert len(set(together)) == len(together)
    assert all(0 <= one < 1 for one in together)


@pytest.mark.parametrize("along", ["seeds", "positions"])
def test_neighbouring_seeds_and_places_are_spread_evenly(along: str) -> None:
    """Chi-square over 50 bins: 85.4 is passed by one in a thousand."""
    many, fixed = list(range(20_000)), [7] * 20_000
    found = numbers(many, fixed) if along == "seeds" else numbers(fixed, many)
    counts = np.histogram(found, bins=50, range=(0, 1))[0]
    assert ((counts - 400) ** 2 / 400).sum() < 85.4
    lagged = np.corrcoef(found[:-1], found[1:])[0, 1]
    assert abs(lagged) < 4 / 20_000**0.5
