"""Jobs that start from checkpoints, as long as three links, and what comes out loaded by transformers and PEFT.

Two oracles: the held-out loss that a job reports for its last step is what the downloaded checkpoint has under
transformers and PEFT; and what a job reports before its first step is what the job before it ended with.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from finery import Finery
from finery.types.checkpoints import Checkpoint
from finery.types.files import File
from finery.types.jobs import Job
from finery_testing.stack import Stack

from .conftest import HELD_OUT, TINY, conversation
from .jobs import held_out_losses, short, succeeded

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
IM_START, IM_END = 259, 260
LORA = {"type": "lora", "rank": 4, "alpha": 8}


def near(loss: float) -> Any:
    return pytest.approx(loss, rel=1e-4)


class Chain:
    """Jobs by name, each with its checkpoint, downloaded when it is asked for."""

    def __init__(self, client: Finery, training_file: File, validation_file: File, folder: Path) -> None:
        self.client, self.training, self.validation, self.folder = client, training_file, validation_file, folder
        self.jobs: dict[str, Job] = {}

    def start(self, name: str, *, on: str | None = None, **fields: Any) -> None:
        start = {} if on is None else {"from_checkpoint": self.checkpoint(on).id}
        fields = {"training_file": self.training.id, **fields}
        self.jobs[name] = short(self.client, validation_file=self.validation.id, **start, **fields)

    def checkpoint(self, name: str) -> Checkpoint:
        succeeded(self.client, self.jobs[name])
        (checkpoint,) = self.client.checkpoints.list(job=self.jobs[name].id)
        return checkpoint

    def losses(self, name: str) -> tuple[float, float]:
        """Held out, before the first and after the last step."""
        by_step = held_out_losses(self.client, self.jobs[name])
        return by_step[0], by_step[max(by_step)]

    def download(self, name: str) -> Path:
        folder = self.folder / name
        if not folder.exists():
            self.client.checkpoints.download(self.checkpoint(name).id, folder)
        return folder


@pytest.fixture(scope="module")
def chain(
    client: Finery, training_file: File, validation_file: File, tmp_path_factory: pytest.TempPathFactory
) -> Chain:
    chain = Chain(client, training_file, validation_file, tmp_path_factory.mktemp("chain"))
    chain.start("lora", adapter=LORA)
    chain.start("full", adapter={"type": "full"})
    chain.start("goes on", on="lora", export_merged=True)
    chain.start("new on merged", on="lora", merge_checkpoint=True, adapter={**LORA, "rank": 2})
    chain.start("lora on full", on="full", adapter=LORA)
    chain.start("full on both", on="new on merged", adapter={"type": "full"})
    return chain


@pytest.fixture(scope="module")
def base(stack: Stack, chain: Chain) -> Any:
    return whole(stack.home.parent / TINY)


def whole(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def adapted(model: Any, folder: Path) -> Any:
    """A copy with the adapter on it."""
    return PeftModel.from_pretrained(copy.deepcopy(model), folder)


@torch.no_grad()
def loss_of(model: Any) -> float:
    """Over the answers of the held-out rows, by hand: F-TOK, F-CHAT."""
    total, count = 0.0, 0
    for n in HELD_OUT:
        prompt, answer = tokens(*conversation(n))
        logits = model(input_ids=torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        total += torch.nn.functional.cross_entropy(logits, torch.tensor(answer), reduction="sum").item()
        count += len(answer)
    return total / count


def tokens(question: str, answer: str) -> tuple[list[int], list[int]]:
    prompt = [IM_START, *f"user\n{question}".encode(), IM_END, 10, IM_START, *b"assistant\n"]
    return prompt, [*answer.encode(), IM_END]


def test_an_adapter_loads_with_peft_and_all_weights_with_transformers(chain: Chain, base: Any) -> None:
    assert (chain.checkpoint("lora").kind, chain.checkpoint("full").kind) == ("adapter", "full")
    before = loss_of(base)
    assert chain.losses("lora")[0] == near(before)
    assert loss_of(adapted(base, chain.download("lora"))) == near(chain.losses("lora")[1])
    assert loss_of(whole(chain.download("full"))) == near(chain.losses("full")[1])
    assert max(chain.losses("lora")[1], chain.losses("full")[1]) < before


def test_both_carry_tokenizer_and_template(chain: Chain) -> None:
    prompt, answer = tokens("hi", "ok")
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ok"}]
    for name in ("lora", "full"):
        tokenizer = AutoTokenizer.from_pretrained(chain.download(name))
        ids = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True)["input_ids"]
        assert ids == [*prompt, *answer, 10]
        card = (chain.download(name) / "README.md").read_text()
        assert chain.jobs[name].id in card
    assert sorted(whole(chain.download("full")).generation_config.eos_token_id) == [257, IM_END]


def test_an_adapter_goes_on_and_is_merged_at_the_end(chain: Chain, base: Any) -> None:
    first, last = chain.losses("goes on")
    assert first == near(chain.losses("lora")[1])
    assert last < first
    folder = chain.download("goes on")
    assert loss_of(adapted(base, folder)) == near(last)
    assert loss_of(whole(folder / "merged")) == near(last)
    job = chain.client.jobs.retrieve(chain.jobs["goes on"].id)
    assert (job.from_checkpoint, job.adapter["rank"]) == (chain.checkpoint("lora").id, 4), "its shape is taken over"


def test_a_new_adapter_starts_on_the_merged_one(chain: Chain, base: Any) -> None:
    first, last = chain.losses("new on merged")
    assert first == near(chain.losses("lora")[1])
    below = adapted(base, chain.download("lora")).merge_and_unload()
    assert loss_of(adapted(below, chain.download("new on merged"))) == near(last)


def test_an_adapter_on_all_weights(chain: Chain) -> None:
    first, last = chain.losses("lora on full")
    assert first == near(chain.losses("full")[1])
    below = whole(chain.download("full"))
    assert loss_of(adapted(below, chain.download("lora on full"))) == near(last)


def test_three_links(chain: Chain) -> None:
    """LoRA, merged; a new LoRA, merged; all weights."""
    first, last = chain.losses("full on both")
    assert first == near(chain.losses("new on merged")[1])
    assert chain.checkpoint("full on both").kind == "full"
    assert loss_of(whole(chain.download("full on both"))) == near(last)


def test_d05_added_tokens_are_one_token_each_trained_and_exported(chain: Chain, base: Any, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    row = {"messages": [{"role": "user", "content": "<|a|>"}, {"role": "assistant", "content": "<|b|>x"}]}
    rows.write_text((json.dumps(row) + "\n") * 4)
    chain.start(
        "added",
        training_file=chain.client.files.upload(rows).id,
        added_tokens=["<|a|>", "<|b|>"],
        adapter={**LORA, "modules_to_save": ["embed_tokens"]},
    )
    job = succeeded(chain.client, chain.jobs["added"])
    assert job.data is not None
    assert job.data.vocab_size == 263
    train = job.data.sets["train"]
    # F-CHAT: 9 + 15 tokens, as an added token is one; <|b|>, x and the end are trained.
    assert (train.tokens, train.trained_tokens) == (4 * 24, 4 * 3)
    folder = chain.download("added")
    assert len(AutoTokenizer.from_pretrained(folder)) == 263
    with pytest.raises(RuntimeError, match="263"):
        adapted(base, folder)
    resized = copy.deepcopy(base)
    resized.resize_token_embeddings(263, mean_resizing=False)
    assert loss_of(adapted(resized, folder)) == near(chain.losses("added")[1])
