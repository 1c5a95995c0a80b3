"""How alike two texts are, from 0 (nothing in common) to 1. Pure.

`fuzzy_match` compares characters as they are; all others compare words without regard to case: runs of letters, digits
and `_` in any script, and for BLEU and GLEU every other sign that is no space. Two texts without words are alike.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Hashable, Sequence

MAX_CHARACTERS = 65_536
"""Of each text; comparing takes their product in time."""
_WORDS = re.compile(r"\w+")
_TOKENS = re.compile(r"\w+|[^\w\s]")
_ORDER = 4


def fuzzy_match(text: str, reference: str) -> float:
    """2·LCS / (|text| + |reference|) over characters, LCS the longest common subsequence: the normalised Indel
    similarity, which is `fuzz.ratio / 100` of rapidfuzz."""
    total = len(text) + len(reference)
    return 2 * longest_common(text, reference) / total if total else 1.0


def bleu(text: str, reference: str) -> float:
    """BP · (p₁·p₂·p₃·p₄)^¼, pₙ the clipped precision of n-grams, BP = min(1, e^(1 - |reference| / |text|)) (Papineni et
    al. 2002). For n > 1 one is added to both counts, so that a short text is not 0 (Lin and Och 2004)."""
    given, wanted = _split(_TOKENS, text), _split(_TOKENS, reference)
    if not given or not wanted:
        return float(given == wanted)
    logs = 0.0
    for n in range(1, _ORDER + 1):
        found, expected = _grams(given, n), _grams(wanted, n)
        matched, count = (found & expected).total(), found.total()
        if n == 1 and matched == 0:
            return 0.0
        logs += math.log(matched / count if n == 1 else (matched + 1) / (count + 1)) / _ORDER
    return math.exp(logs + min(0.0, 1 - len(wanted) / len(given)))


def gleu(text: str, reference: str) -> float:
    """min(precision, recall) over all n-grams of 1 to 4 words together (Wu et al. 2016, arXiv:1609.08144, 4.3)."""
    given, wanted = _split(_TOKENS, text), _split(_TOKENS, reference)
    if not given or not wanted:
        return float(given == wanted)
    found: Counter[tuple[str, ...]] = Counter()
    expected: Counter[tuple[str, ...]] = Counter()
    for n in range(1, _ORDER + 1):
        found += _grams(given, n)
        expected += _grams(wanted, n)
    return (found & expected).total() / max(found.total(), expected.total())


def rouge_n(text: str, reference: str, n: int) -> float:
    """F₁ of n-grams of words (Lin 2004)."""
    given, wanted = _grams(_split(_WORDS, text), n), _grams(_split(_WORDS, reference), n)
    if not given or not wanted:
        return float(given == wanted and text.split() == reference.split())
    return 2 * (given & wanted).total() / (given.total() + wanted.total())


def rouge_l(text: str, reference: str) -> float:
    """F₁ of the longest common subsequence of words (Lin 2004)."""
    given, wanted = _split(_WORDS, text), _split(_WORDS, reference)
    if not given or not wanted:
        return float(given == wanted)
    return 2 * longest_common(given, wanted) / (len(given) + len(wanted))


def longest_common(first: Sequence[Hashable], second: Sequence[Hashable]) -> int:
    """Length of the longest common subsequence, by bit-parallel columns (Hyyrö 2004)."""
    places: dict[Hashable, int] = {}
    for place, element in enumerate(first):
        places[element] = places.get(element, 0) | 1 << place
    everything = (1 << len(first)) - 1
    column = everything
    for element in second:
        matches = column & places.get(element, 0)
        column = (column + matches | column - matches) & everything
    return len(first) - column.bit_count()


def _split(pattern: re.Pattern[str], text: str) -> list[str]:
    return pattern.findall(text.lower())


def _grams(words: Sequence[str], n: int) -> Counter[tuple[str, ...]]:
    return Counter(tuple(words[start : start + n]) for start in range(len(words) - n + 1))


METRICS: dict[str, Callable[[str, str], float]] = {
    "fuzzy_match": fuzzy_match,
    "bleu": bleu,
    "gleu": gleu,
    "rouge_1": lambda text, reference: rouge_n(text, reference, 1),
    "rouge_2": lambda text, reference: rouge_n(text, reference, 2),
    "rouge_l": rouge_l,
}
