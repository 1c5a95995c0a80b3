"""Prepared rows token by token, for people to look at."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from finery.data.rows import TokensRow
from finery.types.previews import PreviewRow, PreviewToken
from finery_gpu_workers.data.chat import RowError
from finery_gpu_workers.data.cutting import Cutter
from finery_gpu_workers.data.rendering import Rendering
from finery_gpu_workers.data.samples import Plain, Sample
from finery_gpu_workers.data.tokens import RowTokenizer, TokenRow


def preview_rows(rendering: Rendering, tokenizer: RowTokenizer, cutter: Cutter) -> Iterator[PreviewRow]:
    """One for the row, or one for each of its turns where it is unrolled."""
    if rendering.problem:
        yield PreviewRow(line=rendering.line, problem=rendering.problem)
        return
    for sample, row in zip(rendering.samples, rendering.tokens, strict=True):
        yield _preview_row(rendering.line, sample, row, tokenizer, cutter)


def _preview_row(line: int, sample: Sample, row: TokenRow, tokenizer: RowTokenizer, cutter: Cutter) -> PreviewRow:
    try:
        kept = cutter.cut(row)
    except RowError as error:
        return PreviewRow(line=line, problem=error.problem(line))
    if isinstance(kept, str):
        return PreviewRow(line=line, dropped=kept)
    texts = _texts(sample, row, tokenizer)
    truncated = len(kept.tokens) < len(row.tokens)
    if truncated:
        head, rest = cutter.keeps(row)
        texts = texts[head] + texts[rest]
    shown = zip(kept.tokens.tolist(), texts, kept.mask.tolist(), strict=True)
    tokens = tuple(PreviewToken(id=id_, text=text, trained=bool(trained)) for id_, text, trained in shown)
    return PreviewRow(line=line, tokens=tokens, trained_tokens=kept.trained, truncated=truncated)


def _texts(sample: Sample, row: TokenRow, tokenizer: RowTokenizer) -> list[str]:
    """The text of every token of the uncut row."""
    if isinstance(sample, TokensRow):
        return tokenizer.stream(row.tokens.tolist())
    text = sample.prompt + sample.rest if isinstance(sample, Plain) else sample.text
    (encoding,) = tokenizer.encode([text])
    texts = _pieces(text, encoding.offsets)
    if isinstance(sample, Plain):
        before, behind = ([tokenizer.decode([id_]) for id_ in ids] for ids in tokenizer.around(encoding.ids))
        return [*before, *texts, *behind]
    return texts


def _pieces(text: str, offsets: Sequence[tuple[int, int]]) -> list[str]:
    """Each token's part; where tokens share a character (its bytes), the first has it. Together they are the text."""
    starts = [0, *(start for start, _ in offsets[1:])][: len(offsets)]
    pieces = []
    end = len(text)
    for n in range(len(starts) - 1, -1, -1):
        is_first = n == 0 or starts[n - 1] < starts[n]
        pieces.append(text[starts[n] : end] if is_first else "")
        end = starts[n] if is_first else end
    return pieces[::-1]
