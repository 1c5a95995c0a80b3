"""What both sides of grpo_step answer to: one word as JSON; four prompts to a step, eight answers to each."""

from __future__ import annotations

import json

PROMPTS_PER_STEP, SAMPLES, NEW_TOKENS = 4, 8, 64
WORDS = ("iron", "water", "paper", "stone", "apple", "cloud", "river", "candle", "window", "garden", "mirror", "bridge")


def prompt(word: str) -> str:
    """In ChatML, up to where the answer begins."""
    return (
        "<|im_start|>system\nYou answer with JSON only.<|im_end|>\n"
        f'<|im_start|>user\nAnswer with exactly {{"word": X}} where X is the word {word} in quotes.<|im_end|>\n'
        "<|im_start|>assistant\n"
    )


def reward(word: str, text: str) -> float:
    """1 for the JSON object that was asked for, alone; less where it is only among other text."""
    try:
        return 1.0 if json.loads(text) == {"word": word} else 0.3
    except ValueError:
        return 0.1 * (word in text) + 0.1 * ("{" in text) + 0.1 * ('"word"' in text)
