"""From samples to token ids and masks: every text is tokenised once, and positions come from offsets."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Encoding, Tokenizer
from tokenizers.decoders import DecodeStream

from finery.data.rows import TokensRow
from finery_gpu_workers.data.chat import RowError
from finery_gpu_workers.data.folder import end_tokens
from finery_gpu_workers.data.places import Places
from finery_gpu_workers.data.samples import Plain, Prompted, Sample
from finery_gpu_workers.data.turns import Rendered, Turn, not_a_prefix
from finery_gpu_workers.errors import WorkerError

_KNOWN_PROMPTS, _SHORT_PROMPT = 1000, 256


@dataclass(frozen=True)
class TokenRow:
    tokens: NDArray[np.int32]
    """[T]"""
    mask: NDArray[np.uint8]
    """[T], 1 where the token is a target; the first never is: nothing precedes it."""
    reasoning: tuple[tuple[int, int], ...] = ()
    """Token positions from and to of reasoning that is to be trained."""
    lost_reasoning: int = 0
    """Tokens of reasoning that the template did not write."""
    notes: frozenset[str] = frozenset()
    """Codes of warnings."""
    prompt: int = 0
    """Of one side of a pair: the tokens of the prompt that both sides begin with."""

    @property
    def trained(self) -> int:
        return int(self.mask.sum())

    @property
    def reasoning_tokens(self) -> int:
        return sum(end - start for start, end in self.reasoning) + self.lost_reasoning

    @property
    def reasoning_trained(self) -> int:
        return sum(int(self.mask[start:end].sum()) for start, end in self.reasoning)


class RowTokenizer:
    """A model's tokenizer. It adds no token of its own to what a template has written; text gets the tokenizer's own
    BOS, if its post-processor adds one, and an end token, but where it has them already."""

    def __init__(self, tokenizer: Tokenizer, ends: Sequence[int] = ()) -> None:
        """`ends`: ids that end a text for the model; the first is written behind texts."""
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self.begin = _begin(tokenizer)
        """Ids before a text that no template wrote."""
        tokenizer.post_processor = None  # some trim white space off the offsets
        self._tokenizer = tokenizer
        self._ends = list(ends)
        self.vocab_size = tokenizer.get_vocab_size(with_added_tokens=True)
        added = tokenizer.get_added_tokens_decoder()
        ids = [*tokenizer.get_vocab(with_added_tokens=True).values(), *added]
        self._is_special = np.zeros(max(ids) + 1, dtype=np.bool_)  # ids may have gaps
        self._is_special[[id_ for id_, token in added.items() if token.special]] = True
        self._may_end = self._is_special.copy()
        self._may_end[[id_ for id_ in ends if id_ < len(self._may_end)]] = True
        self.unknown = _unknown(tokenizer)
        """The id of characters that have none, where the tokenizer has one."""
        self._prompts: dict[str, list[int]] = {}
        self.end_of_turn: set[int] = set()
        """Ids that have ended a trained turn or text so far."""

    @classmethod
    def load(cls, folder: Path, added_tokens: Iterable[str] = ()) -> RowTokenizer:
        """The tokenizer of a folder, with special tokens added that it does not have yet."""
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        add_tokens(tokenizer, added_tokens)
        return cls(tokenizer, end_tokens(folder, tokenizer))

    def encode(self, texts: Sequence[str]) -> list[Encoding]:
        return self._tokenizer.encode_batch(list(texts), add_special_tokens=False)

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    def stream(self, ids: Sequence[int]) -> list[str]:
        """The text of every id; of ids that share a character the first has it."""
        texts = [""] * len(ids)
        stream, first = DecodeStream(skip_special_tokens=False), 0
        for n, id_ in enumerate(ids):
            if (text := stream.step(self._tokenizer, id_)) is not None:
                texts[first] = text
                first = n + 1
        if first < len(ids):  # half a character at the end
            texts[first] = self.decode(ids[first:])
        return texts

    def special_names(self, rows: Sequence[TokenRow]) -> set[str]:
        """The texts of the special tokens that the rows hold."""
        found = {id_ for row in rows for id_ in row.tokens[self._is_special[row.tokens]].tolist()}
        return {text for id_ in found if (text := self._tokenizer.id_to_token(id_))}

    @property
    def edges(self) -> tuple[str, str]:
        """The texts of what goes before and behind a text; empty where there is nothing."""
        return self.decode(self.begin), self.decode(self._ends[:1])

    def rows(self, samples: Sequence[Sample]) -> list[TokenRow | RowError]:
        texts = [text for sample in samples for text in _texts(sample)]
        encodings = iter(self.encode(texts))
        return [self._row(sample, [next(encodings) for _ in _texts(sample)]) for sample in samples]

    def _row(self, sample: Sample, encodings: list[Encoding]) -> TokenRow | RowError:
        if isinstance(sample, TokensRow):
            return _given(sample)
        if isinstance(sample, Plain):
            return self._plain(sample, encodings)
        if isinstance(sample, Prompted):
            return self._prompted(sample, encodings[0].ids)
        return self._rendered(sample, encodings)

    # ---- text without a template

    def _plain(self, sample: Plain, encodings: list[Encoding]) -> TokenRow | RowError:
        ids = encodings[0].ids
        prompt = 0
        if not sample.everything and sample.prompt:
            start = encodings[1].ids
            prompt = len(start)
            if ids[:prompt] != start:
                return _no_boundary()
        before, behind = self.around(ids)
        self.end_of_turn.add(self._end())
        tokens = np.array([*before, *ids, *behind], dtype=np.int32)
        mask = np.ones(len(tokens), dtype=np.uint8)
        mask[: len(before) + prompt if not sample.everything else 1] = 0
        mask[:1] = 0
        return TokenRow(tokens, mask, notes=self._notes(tokens))

    def around(self, ids: list[int]) -> tuple[list[int], list[int]]:
        """What goes before and behind the ids of a text: its BOS and its end, but where it has them already."""
        end = [self._end()]
        return self.begin if ids[: len(self.begin)] != self.begin else [], end if ids[-1:] != end else []

    def _prompted(self, sample: Prompted, ids: list[int]) -> TokenRow | RowError:
        before = self.around(ids)[0] if sample.is_text else []
        tokens = np.array([*before, *ids], dtype=np.int32)
        if not len(tokens):
            return RowError("template_error", "expected a prompt, found no token", hint="Mend the template.")
        return TokenRow(tokens, np.zeros(len(tokens), dtype=np.uint8), notes=self._notes(tokens))

    def _end(self) -> int:
        if not self._ends:
            message = "expected an end token (eos_token) in the tokenizer's or the model's configuration, found none"
            raise WorkerError("invalid_model", message, param="model")
        return self._ends[0]

    # ---- what a template has written

    def _rendered(self, sample: Rendered, encodings: list[Encoding]) -> TokenRow | RowError:
        encoding = encodings[0]
        ids = np.array(encoding.ids, dtype=np.int32)
        mask = np.full(len(ids), sample.everything, dtype=np.uint8)
        places = Places(sample.text, encoding)
        ended = True
        special, ends = np.flatnonzero(self._is_special[ids]), np.flatnonzero(self._may_end[ids])
        for turn in sample.turns:
            first, last = places.token(turn.start), places.token(turn.end)
            if not self._same_prompt(sample.text, turn.start, ids[:first], places, special):
                return not_a_prefix()
            end = self._end_of_turn(turn, ids, ends[(ends >= first) & (ends < last)], places)
            mask[first : last if end is None else end + 1] = not sample.everything
            ended &= sample.everything or end is not None
        if sample.closing:
            first = places.token(sample.closing.start)
            ended = self._end_of_turn(sample.closing, ids, ends[ends >= first], places) is not None
        mask[:1] = 0
        reasoning = tuple((places.token(start), places.token(end)) for start, end in sample.reasoning)
        lost = sum(len(alone.ids) for alone in encodings[1:])
        return TokenRow(ids, mask, reasoning, lost, self._notes(ids, ended))

    def _notes(self, ids: NDArray[np.int32], ended: bool = True) -> frozenset[str]:
        unknown = self.unknown is not None and bool((ids == self.unknown).any())
        found = {"unknown_characters": unknown, "end_of_turn_not_rendered": not ended}
        return frozenset(code for code, is_so in found.items() if is_so)

    def _end_of_turn(self, turn: Turn, ids: NDArray[np.int32], ends: NDArray[np.int64], places: Places) -> int | None:
        """The position of the token that ends the turn, if one does. `ends`: those inside the turn that may."""
        after = [int(n) for n in ends if places.start(int(n)) >= turn.content_end]
        if not after:
            return None
        end = after[0]
        if turn.calls:  # markup may stand between the calls and the end
            known = self.end_of_turn | set(self._ends)
            end = next((n for n in after if int(ids[n]) in known), after[-1])
        self.end_of_turn.add(int(ids[end]))
        return end

    def _same_prompt(
        self, text: str, end: int, ids: NDArray[np.int32], places: Places, special: NDArray[np.int64]
    ) -> bool:
        """Whether the prompt alone has the ids that it has inside the row.

        Special tokens split the text before anything else, so that what follows the last one decides. It is the
        same few characters in almost every row.
        """
        if not len(ids) or places.end(len(ids) - 1) > end:
            return False
        before = int(np.searchsorted(special, len(ids)))
        start = int(special[before - 1]) if before else 0
        tail = text[places.start(start) : end]
        alone = self._prompts.get(tail)
        if alone is None:
            alone = self._tokenizer.encode(tail, add_special_tokens=False).ids
            if len(tail) <= _SHORT_PROMPT and len(self._prompts) < _KNOWN_PROMPTS:
                self._prompts[tail] = alone
        return bool(alone == ids[start:].tolist())


def _texts(sample: Sample) -> list[str]:
    """What of a sample is tokenised: its text, and what is compared with it."""
    if isinstance(sample, TokensRow):
        return []
    if isinstance(sample, Prompted):
        return [sample.text]
    if isinstance(sample, Rendered):
        return [sample.text, *sample.lost]
    whole = sample.prompt + sample.rest
    return [whole] if sample.everything or not sample.prompt else [whole, sample.prompt]


def _given(row: TokensRow) -> TokenRow:
    mask = np.array(row.trained, dtype=np.uint8)
    mask[:1] = 0
    return TokenRow(np.array(row.input_ids, dtype=np.int32), mask)


def _no_boundary() -> RowError:
    return RowError(
        "prompt_not_prefix",
        "expected the prompt's tokens to be the first of the row's, found a token across the end of the prompt",
        path="prompt",
        hint="End the prompt where a word ends: move white space at its end to the start of the completion.",
    )


def _begin(tokenizer: Tokenizer) -> list[int]:
    """What the tokenizer's own post-processor puts before a text."""
    for text in "aA1.":  # some vocabularies are small, of proteins perhaps
        with_, without = (tokenizer.encode(text, add_special_tokens=added).ids for added in (True, False))
        starts = (n for n in range(len(with_) - len(without) + 1) if with_[n : n + len(without)] == without)
        if without:
            return list(with_[: next(starts, 0)])
    return []


def _unknown(tokenizer: Tokenizer) -> int | None:
    """What two characters that no vocabulary has are both read as."""
    one, other = (tokenizer.encode(text, add_special_tokens=False).ids for text in ("\U000f1234", "\U0010fffd"))
    return one[-1] if one and one[-1:] == other[-1:] else None


def add_tokens(tokenizer: Tokenizer, texts: Iterable[str]) -> int:
    """Adds special tokens, in order, but for those that it has; how many are new."""
    special = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}
    new = [text for text in dict.fromkeys(texts) if text not in special]
    return int(tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in new]))


def tokenizer_sha256(folder: Path) -> str:
    return hashlib.sha256((folder / "tokenizer.json").read_bytes()).hexdigest()
