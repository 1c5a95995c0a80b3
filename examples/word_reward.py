"""A reward file, as a customer writes one: the answer must be exactly {"word": "<the word>"}."""

import json
from typing import Any


def grade(sample: dict[str, Any], item: dict[str, Any]) -> dict[str, float]:
    """1 for the object alone; parts of it for text that comes near."""
    text, word = sample["output_text"].strip(), item["word"]
    try:
        exact = json.loads(text) == {"word": word}
    except ValueError:
        exact = False
    if exact:
        return {"exact": 1.0}
    return {"begins": 0.1 * text.startswith('{"word":'), "word": 0.1 * (word in text), "ends": 0.1 * text.endswith("}")}
