"""What a customer does with a checkpoint's card: copies the lines, fills in the folders, runs them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from finery_gpu_workers.learner import Learner


def run_card(folder: Path, section: int = 0, **folders: Path) -> dict[str, Any]:
    """Runs a section's lines; `base` and the checkpoints below by id. Returns their names: `model`, `tokenizer`."""
    code = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)[section]
    code = code.replace("<this folder>", str(folder)).replace("<folder of the base model>", str(folders.get("base")))
    for name, path in folders.items():
        code = code.replace(f"<folder of {name}>", str(path))
    assert "<" not in re.sub(r"#.*", "", code), code
    names: dict[str, Any] = {}
    exec(code, names)  # the text under test
    return names


def logits_of(model: Any, ids: list[int]) -> Tensor:
    """Of a transformers or PEFT model, float32 [T, vocab]."""
    with torch.no_grad():
        found: Tensor = model(torch.tensor([ids])).logits[0].float()
    return found


class Spy:
    """Takes the trainer's own logits for `ids` when it writes its last checkpoint."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, ids: list[int]) -> None:
        self.ids = ids
        self.logits = torch.empty(0)
        save = Learner.save

        def spying(learner: Learner, *arguments: Any, **named: Any) -> None:
            tokens = torch.tensor(ids)
            with torch.no_grad():
                hidden = learner._model.forward(tokens, torch.arange(len(ids)), (len(ids),))
                self.logits = learner._model.logits(hidden).float()
            save(learner, *arguments, **named)

        monkeypatch.setattr(Learner, "save", spying)
