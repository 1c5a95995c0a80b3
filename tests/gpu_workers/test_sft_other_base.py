"""A checkpoint is only good for the weights that it was trained on."""

from __future__ import annotations

from pathlib import Path

import pytest

from finery.types.methods import FullWeights, LoraAdapter
from finery_testing.tiny import make_tiny_model

from .conftest import ADAPTER, MakeJob, chat_rows, ended, evaluations, goes_on, stands_on, trained

FULL, OTHER = FullWeights(type="full"), LoraAdapter(rank=2, alpha=4.0, targets=("q_proj",))


@pytest.mark.parametrize("how", ["goes on", "merged", "merged below another"])
def test_an_adapter_does_not_start_on_other_weights_of_the_same_shapes(
    make_job: MakeJob, tmp_path: Path, how: str
) -> None:
    """As when the catalogue's entry of that name has new weights since. Found before an accelerator is taken."""
    base = make_tiny_model(tmp_path / "base")
    first = trained(make_job(model=base, max_steps=1))
    if how == "merged below another":
        first = trained(make_job(model=base, max_steps=1, onto=stands_on(first, "merge")))
    make_tiny_model(base, seed=1)
    second = trained(make_job(model=base, onto=goes_on(first) if how == "goes on" else stands_on(first, "merge")))
    assert ended(second) == "invalid_model"
    assert second.prepared is None
    assert second.finished is not None
    assert second.finished.error is not None
    assert second.finished.error.code == "base_changed"


def test_whole_weights_need_no_base(make_job: MakeJob, tmp_path: Path) -> None:
    """Also those below an adapter that is merged or goes on."""
    base, held_out = make_tiny_model(tmp_path / "base"), chat_rows(3)
    whole = trained(make_job(model=base, adapter=FULL, validation=held_out))
    make_tiny_model(base, seed=1)
    adapter = trained(make_job(model=base, onto=stands_on(whole, "full"), validation=held_out))
    assert evaluations(adapter)[0] == evaluations(whole)[whole.step]
    for onto, third_adapter in ((goes_on(adapter), ADAPTER), (stands_on(adapter, "merge"), OTHER)):
        third = trained(make_job(model=base, onto=onto, validation=held_out, adapter=third_adapter))
        assert ended(third) == "completed"
        assert evaluations(third)[0] == pytest.approx(evaluations(adapter)[adapter.step], rel=1e-5)
