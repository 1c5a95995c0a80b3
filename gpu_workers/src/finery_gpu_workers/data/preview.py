"""Prepared rows token by token, for people to look at."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from finery.data.rows import TokensRow
from finery.types.previews import PreviewRow, PreviewToken
from finery_gpu_workers.data.chat import RowError
from finery_gpu_workers.data.cutting import Cutter
from finery_gpu_workers.data.pairs import SIDES
from finery_gpu_workers.data.rendering import Rendering
from finery_gpu_workers.data.samples import Plain, Prompted, Sample
from finery_gpu_workers.data.tokens import RowTokenizer, TokenRow


def preview_rows(rendering: Rendering, tokenizer: RowTokenizer, cutter: Cutter) -> Iterator[PreviewRow]:
    """One for the row; or one for each of its turns where it is unrolled, or for each answer of a pair."""
    if rendering.problem:
        yield PreviewRow(line=rendering.line, problem=rendering.problem)
        return
    rows, kind = rendering.tokens, rendering.kind
    groups = [rows] if kind == "pair" else [[row] for row in rows]
    samples = iter(rendering.samples)
    for group in groups:
        shown = [next(samples) for _ in group]
        try:
            kept = cutter.cut_all(group, kind)
        except RowError as error:
            yield PreviewRow(line=rendering.line, problem=error.problem(rendering.line))
            continue
        names = SIDES if kind == "pair" else [None]
        for name, sample, row, left, keeps in zip(
            names, shown, group, kept, cutter.keeps_all(group, kind), strict=True
        ):
            found = _preview_row(rendering.line, _texts(sample, row, tokenizer), row, left, keeps)
            yield found.model_copy(update={"answer": name})


def _preview_row(
    line: int, texts: list[str], row: TokenRow, kept: TokenRow | str, keeps: tuple[slice, slice]
) -> PreviewRow:
    """`texts`: of the tokens of the uncut row; `keeps`: those that are left, where it is cut."""
    if isinstance(kept, str):
        return PreviewRow(line=line, dropped=kept)
    truncated = len(kept.tokens) < len(row.tokens)
    if truncated:
        head, rest = keeps
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
    if isinstance(sample, Prompted) and sample.is_text:
        texts = [*(tokenizer.decode([id_]) for id_ in tokenizer.around(encoding.ids)[0]), *texts]
    return texts[: len(row.tokens)]  # of a pair, what follows an answer is left out


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
