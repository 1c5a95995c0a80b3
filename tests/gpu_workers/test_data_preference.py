"""Cases of ../shared/cases/b-preference.md that are about data: uploaded pairs in, stored ids and masks out."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from finery_gpu_workers import run
from finery_gpu_workers.data import prepared
from finery_gpu_workers.data.chat import RowError
from finery_gpu_workers.data.packing import Plan
from finery_gpu_workers.data.pairs import pair_up
from finery_gpu_workers.data.preference import Pairs
from finery_gpu_workers.data.tokens import RowTokenizer, TokenRow
from finery_protos.v1 import worker_pb2 as pb
from finery_testing.control_plane import FakeControlPlane
from finery_testing.tiny import BOS, CHAT_TEMPLATE, EOS, IM_END, make_tiny_model

from .conftest import MakeJob, as_jsonl, ended
from .in_process import Render, rendered
from .pairs import ids, masks, pairs_of, texts, with_bos
from .samples import HI, OK, tokenised

__all__ = ["rendered"]  # the fixture

NO = {"role": "assistant", "content": "no"}
PROMPT = [259, *b"user\nhi", IM_END, 10, 259, *b"assistant\n"]
"""F-CHAT: user "hi" is 10 tokens, the header of the answer 11."""


def prepare(control: FakeControlPlane) -> Pairs:
    run.main(control.attempt(pb.ATTEMPT_KIND_PREPARE))
    assert control.prepared is not None, control.finished
    return Pairs(prepared.load(control.store / control.prepared.prepared_prefix).train)


def refusal(control: FakeControlPlane) -> tuple[str, list[dict[str, Any]]]:
    run.main(control.attempt(pb.ATTEMPT_KIND_PREPARE))
    assert ended(control) == "invalid_data"
    assert control.finished is not None
    assert control.finished.error is not None
    return control.finished.error.code, control.finished.error.details or []


# ---- what is stored


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [HI], "chosen": "ok", "rejected": "no"},
        {"prompt": [HI], "chosen": [OK], "rejected": [NO]},
        {"chosen": [HI, OK], "rejected": [HI, NO]},
    ],
)
def test_b13_answers_and_their_end_of_turn_are_trained_and_nothing_else(rendered: Render, row: dict[str, Any]) -> None:
    found = rendered("dpo", [row])
    pairs, report = Pairs(found.data.train), found.train
    pair = pairs.pair(0)
    assert ids(pair) == (PROMPT, [*b"ok", IM_END], [*b"no", IM_END])
    assert masks(pair) == ([1, 1, 1], [1, 1, 1])
    assert (pairs.lengths.tolist(), pairs.trained.tolist()) == ([27], [6])
    assert (report.format, report.rows, report.tokens, report.trained_tokens) == ("preference", 1, 27, 6)
    assert (report.longest, report.truncated_rows, report.dropped_rows) == (24, 0, 0)


def test_pairs_are_the_samples_2n_and_2n_plus_1_of_the_set(make_job: MakeJob) -> None:
    rows = [{"messages": [HI], "chosen": "ok", "rejected": "no"}, {"prompt": "p", "chosen": "c", "rejected": "dd"}]
    control = make_job(rows, method="dpo", epochs=2)
    pairs = prepare(control)
    assert control.prepared is not None
    data = prepared.load(control.store / control.prepared.prepared_prefix).train
    found = [(row.tokens.tolist(), row.mask.tolist()) for row in map(data.row, range(len(data)))]
    assert found == [
        ([*PROMPT, *b"ok", IM_END], [0] * 21 + [1] * 3),
        ([*PROMPT, *b"no", IM_END], [0] * 21 + [1] * 3),
        ([*b"pc", EOS], [0, 1, 1]),
        ([*b"pdd", EOS], [0, 1, 1, 1]),
    ]
    plan = Plan(pairs.lengths, control.spec.hyperparameters, 0)  # type: ignore[arg-type]
    assert control.prepared.total_steps == plan.total_steps
    assert (control.prepared.rows, control.prepared.tokens) == (2, 27 + 6)
    assert (control.prepared.trained_tokens, control.prepared.total_trained_tokens) == (6 + 5, 2 * 11)


def test_of_an_answer_of_several_turns_only_the_assistants_are_trained(rendered: Render) -> None:
    """`ok` (3 tokens), its newline, the user's 10, the header's 11, and `ok` again."""
    (pair,) = pairs_of(rendered, [{"prompt": [HI], "chosen": [OK, HI, OK], "rejected": [NO]}])
    assert masks(pair) == ([1] * 3 + [0] * 22 + [1] * 3, [1] * 3)
    assert bytes(n for n in pair.chosen.tolist() if n < 256) == b"ok\nuser\nhi\nassistant\nok"


def test_a_validation_file_is_a_set_of_pairs_too(rendered: Render) -> None:
    rows = [texts(2, 2, 2)]
    found = rendered("dpo", rows, other=[*rows, texts(3, 2, 3)])
    assert found.data.validation is not None
    assert Pairs(found.data.validation).lengths.tolist() == [6, 8]
    assert found.warnings == {"validation_overlap": [{"rows": 1, "lines": [1]}]}


def test_parquet_pairs_are_prepared_as_the_same_pairs_of_jsonl(make_job: MakeJob, rendered: Render) -> None:
    rows = [{"messages": [HI], "chosen": "ok", "rejected": "no"}, {"messages": [HI], "chosen": "a", "rejected": "b"}]
    file = io.BytesIO()
    pq.write_table(pa.table({key: [row[key] for row in rows] for key in rows[0]}), file)
    control = make_job(file.getvalue(), method="dpo")
    control.training_encoding = "parquet"
    pairs = prepare(control)
    assert [ids(pairs.pair(n)) for n in range(2)] == [ids(pair) for pair in pairs_of(rendered, rows)]


# ---- BOS


def without_bos(folder: Path) -> Path:
    make_tiny_model(folder)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"bos_token": None}))
    return folder


def test_b07_a_tokenizer_without_bos_puts_nothing_anywhere(rendered: Render, tmp_path: Path) -> None:
    row = {"prompt": "p", "chosen": "c", "rejected": "r"}
    (pair,) = pairs_of(rendered, [row], model=without_bos(tmp_path / "m"))
    assert ids(pair) == ([112], [99, EOS], [114, EOS])


@pytest.mark.parametrize("prompt", ["p", "<|bos|>p"])
def test_b07_bos_comes_once_and_first(rendered: Render, tmp_path: Path, prompt: str) -> None:
    (pair,) = pairs_of(rendered, [{"prompt": prompt, "chosen": "c", "rejected": "r"}], model=with_bos(tmp_path / "m"))
    assert ids(pair) == ([BOS, 112], [99, EOS], [114, EOS])
    assert masks(pair) == ([1, 1], [1, 1])


def test_b07_a_template_writes_its_own_bos_and_no_second_one_comes(rendered: Render, tmp_path: Path) -> None:
    model = with_bos(tmp_path / "m")
    (model / "chat_template.jinja").write_text("{{ bos_token }}" + CHAT_TEMPLATE)
    (pair,) = pairs_of(rendered, [{"prompt": [HI], "chosen": "ok", "rejected": "no"}], model=model)
    assert ids(pair) == ([BOS, *PROMPT], [*b"ok", IM_END], [*b"no", IM_END])


# ---- B14


def merging() -> Tokenizer:
    """Letters, and one token for `: ` followed by `1`: `p: 1` has it across the end of the prompt `p: `."""
    words = {"p": 0, ":": 1, " ": 2, "1": 3, "2": 4, " 1": 5, "$": 6}
    tokenizer = Tokenizer(models.BPE(vocab=words, merges=[(" ", "1")]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("$", "isolated")
    tokenizer.add_special_tokens([AddedToken("$", special=True)])
    return tokenizer


def pair_of(row: dict[str, Any], tokenizer: Tokenizer) -> list[TokenRow]:
    return pair_up(tokenised(row, tokenizer=RowTokenizer(tokenizer, [6])))


def test_b14_a_token_across_the_end_of_the_prompt_on_one_side_refuses_the_pair() -> None:
    row = {"prompt": "p: ", "chosen": "1", "rejected": "2"}
    for one in (row, row | {"chosen": "2", "rejected": "1"}):
        with pytest.raises(RowError) as refused:
            pair_of(one, merging())
        assert (refused.value.code, refused.value.path) == ("prompt_not_prefix", "prompt")
    chosen, rejected = pair_of({"prompt": "p:", "chosen": " 1", "rejected": " 2"}, merging())
    assert (chosen.tokens.tolist(), rejected.tokens.tolist()) == ([0, 1, 5, 6], [0, 1, 2, 4, 6])
    assert chosen.prompt == rejected.prompt == 2


def test_b14_a_template_that_writes_a_prompt_by_its_answer_is_refused(rendered: Render, tmp_path: Path) -> None:
    """Here the tool is written only as long as nothing is answered."""
    source = "{{ tools[0].n if messages|length == 1 else '' }}" + CHAT_TEMPLATE
    model = make_tiny_model(tmp_path / "m")
    (model / "chat_template.jinja").write_text(source)
    tool = {"type": "function", "n": "x", "function": {"name": "f"}}
    rows = [{"prompt": [HI], "chosen": "ok", "rejected": "no", "tools": [tool]}]
    assert rendered("dpo", rows, model=model).problems == [(1, "chosen[0]", "prompt_not_prefix")]
    with pytest.raises(RowError) as refused:
        pair_up([row_of(1, 2, 3, prompt=1), row_of(2, 2, 4, prompt=1)])
    assert refused.value.code == "prompts_differ"
    with pytest.raises(RowError) as refused:
        pair_up([row_of(1, 2, 3, prompt=1), row_of(1, 2, 4, prompt=2)])
    assert refused.value.code == "prompts_differ"


def row_of(*tokens: int, prompt: int) -> TokenRow:
    import numpy as np

    mask = np.array([n >= prompt for n in range(len(tokens))], dtype=np.uint8)
    return TokenRow(np.array(tokens, dtype=np.int32), mask)


def test_answers_that_a_template_writes_alike_are_refused_by_line(rendered: Render, tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "m")
    (model / "chat_template.jinja").write_text(CHAT_TEMPLATE.replace("message['content']", "message['content']|trim"))
    rows = [{"prompt": [HI], "chosen": "ok", "rejected": rejected} for rejected in ("no", "ok ")]
    assert rendered("dpo", rows, model=model).problems == [(2, "rejected", "identical_answers")]


def test_places_of_problems_are_those_of_the_row(rendered: Render, tmp_path: Path) -> None:
    """A template that drops reasoning of earlier turns takes an answer of one turn only."""
    model = make_tiny_model(tmp_path / "m")
    strips = "message['content'].split('</think>')[-1] if not loop.last and message.role == 'assistant'"
    source = CHAT_TEMPLATE.replace("message['content']", f"({strips} else message['content'])")
    (model / "chat_template.jinja").write_text(source)
    thinking = {"role": "assistant", "content": "<think>r</think>a"}
    whole = {"chosen": [HI, thinking, HI, OK], "rejected": [HI, NO]}
    apart = {"messages": [HI], "chosen": [OK], "rejected": [thinking, HI, NO]}
    assert rendered("dpo", [whole, apart], model=model).problems == [
        (1, "chosen[3]", "prompt_not_prefix"),
        (2, "rejected[2]", "prompt_not_prefix"),
    ]


# ---- warnings, and jobs of other methods


def test_texts_of_both_answers_are_looked_at_for_special_tokens(rendered: Render) -> None:
    rows = [
        {"prompt": [HI], "chosen": "ok", "rejected": "no<|im_end|>"},
        {"prompt": "p", "chosen": "c", "rejected": "r<|eos|>"},
    ]
    assert rendered("dpo", rows).warnings == {
        "special_token_in_content": [{"rows": 1, "lines": [1], "tokens": {"<|im_end|>": 1}}]
    }


@pytest.mark.parametrize(
    ("method", "rows", "expected"),
    [
        ("sft", [{"prompt": "p", "chosen": "c", "rejected": "r"}], "chat or completion or text or tokens"),
        ("dpo", [{"prompt": "p", "completion": "c"}], "preference"),
    ],
)
def test_a_method_takes_no_rows_of_another(make_job: MakeJob, method: str, rows: list[Any], expected: str) -> None:
    control = make_job(as_jsonl(rows), method=method)
    code, _ = refusal(control)
    assert code == "wrong_task_format"
    assert control.finished is not None
    assert control.finished.error is not None
    assert expected in control.finished.error.message
    assert control.finished.error.param == "training_file"
