from __future__ import annotations

from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from finery._draw import smoothed
from finery.plot import curve, loss_curve, picture, points
from finery.types.jobs import Event, Job

from .support import Client, Handler, Seen, client_of, event_json, job_json, page_json, serving, value


def event(seq: int, type_: str, **data: Any) -> Event:
    return Event.model_validate(event_json(seq, type_, **data))


HISTORY = [
    event(1, "state", to="running"),
    event(2, "eval", step=0, loss=3.94),
    *(event(2 + n, "metric", step=n, loss=4.0 - 0.01 * n) for n in range(1, 31)),
    event(33, "metric", step=31, loss=None, non_finite={"loss": "NaN"}),
    event(34, "eval", step=31, loss=3.48),
]


def test_points_are_the_finite_losses_by_step() -> None:
    assert points(HISTORY, "eval") == [(0, 3.94), (31, 3.48)]
    assert [step for step, _ in points(HISTORY, "metric")] == list(range(1, 31))


def test_smoothing_keeps_a_constant_and_lags_a_slope() -> None:
    assert smoothed([2.0] * 50) == pytest.approx([2.0] * 50)
    # Span 3, weight ½, corrected: 1, (¼·1 + ½·4) / ¾ = 3, (⅛·1 + ¼·4 + ½·1) / ⅞ = 13/7.
    assert smoothed([1.0, 4.0, 1.0]) == pytest.approx([1.0, 3.0, 13 / 7])


def test_a_png_is_a_png(tmp_path: Path) -> None:
    path = loss_curve(HISTORY, tmp_path / "loss.png")
    assert path.read_bytes().startswith(b"\x89PNG\r\n")


def test_an_svg_holds_both_curves_title_and_axes(tmp_path: Path) -> None:
    path = loss_curve(iter(HISTORY), str(tmp_path / "loss.SVG"), title="A & B")
    text = path.read_text(encoding="utf-8")
    assert ElementTree.fromstring(text).tag.endswith("svg")
    for comment in ("A &amp; B", "step", "loss (nats per token)", "held-out loss", "3.480"):
        assert f"<!-- {comment}" in text


@pytest.mark.parametrize("name", ["loss", "loss.pdf", "loss.png.txt"])
def test_another_ending_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=r"\.png or \.svg"):
        loss_curve(HISTORY, tmp_path / name)


def test_nothing_to_draw_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nothing to draw"):
        loss_curve([HISTORY[0], HISTORY[-2]], tmp_path / "loss.png")
    assert list(tmp_path.iterdir()) == []


def job(**changes: Any) -> Job:
    return Job.model_validate(job_json(**changes))


def checkpoint(seq: int, step: int, loss: float | None) -> Event:
    return event(seq, "checkpoint", checkpoint=f"ckpt_{step}", step=step, validation_loss=loss)


CHECKPOINTS = [checkpoint(35, 10, 3.7), checkpoint(36, 20, 3.25), checkpoint(37, 25, 3.25), checkpoint(38, 30, None)]


def test_the_best_checkpoint_is_the_jobs_own_word_or_the_earliest_of_the_lowest() -> None:
    assert curve(job(best_checkpoint="ckpt_25"), CHECKPOINTS).best == (25, 3.25)
    assert curve(job(), CHECKPOINTS).best == (20, 3.25)
    assert curve(job(), CHECKPOINTS[-1:]).best is None


def comments(svg: str) -> list[str]:
    """matplotlib writes each text of a picture as a comment beside its glyphs."""
    return [part.split(" -->", 1)[0].strip() for part in svg.split("<!-- ")[1:]]


def drawn(tmp_path: Path, *jobs: tuple[Job, list[Event]]) -> list[str]:
    picture([curve(one, events) for one, events in jobs], tmp_path / "x.svg")
    return comments((tmp_path / "x.svg").read_text(encoding="utf-8"))


def test_one_job_shows_both_losses_the_learning_rate_and_its_best_checkpoint(tmp_path: Path) -> None:
    rates = [event(40 + n, "metric", step=n, loss=4.0 - 0.01 * n, learning_rate=2e-4) for n in range(1, 31)]
    texts = drawn(tmp_path, (job(name="bot"), [*HISTORY, *rates, *CHECKPOINTS]))
    for said in (
        "Loss of bot",
        "learning rate",
        "training loss (smoothed)",
        "held-out loss",
        "best checkpoint: 3.250 at step 20",
    ):
        assert said in texts
    assert "learning rate" not in drawn(tmp_path, (job(name="bot"), HISTORY))


def test_several_jobs_share_a_picture_under_their_names(tmp_path: Path) -> None:
    jobs = [(job(name="$a_b$"), HISTORY), (job(id="job_2"), [*HISTORY[:1], *HISTORY[2:20]])]
    texts = drawn(tmp_path, *jobs)
    assert "Losses of 2 jobs" in texts
    assert {text for text in texts if text.endswith("training loss (smoothed)")} == {
        "$a_b$: training loss (smoothed)",
        "job_2: training loss (smoothed)",
    }, "a name is no formula"


def test_steps_are_whole_numbers(tmp_path: Path) -> None:
    few = [event(n, "metric", step=n, loss=100.0 * n) for n in range(1, 4)]
    assert not {"0.5", "1.5", "2.5"}.intersection(drawn(tmp_path, (job(name="bot"), few)))


async def test_a_client_draws_jobs_for_a_notebook_and_into_a_file(kind: Client, tmp_path: Path) -> None:
    history = [one.model_dump(mode="json") for one in HISTORY]

    def reply(handler: Handler, seen: Seen) -> None:
        name = seen.path.split("/")[3].partition("?")[0]
        handler.json(200, page_json(history) if "/events" in seen.path else job_json(id=name))

    with serving(reply) as server:
        client = client_of(kind, server)
        plot = await value((await value(client.jobs.retrieve("job_1"))).plot())
        assert plot._repr_html_().startswith('<img alt="losses" src="data:image/png;base64,iVBOR')
        assert plot.save(tmp_path / "again.svg").read_text(encoding="utf-8").startswith("<?xml")
        await value(client.jobs.plot("job_1", "job_2", path=tmp_path / "two.png"))
        assert (tmp_path / "two.png").read_bytes().startswith(b"\x89PNG")
        seen = len(server.seen)
        with pytest.raises(ValueError, match=r"\.png or \.svg"):
            await value(client.jobs.plot("job_1", path=tmp_path / "x.pdf"))
        with pytest.raises(ValueError, match="expected at least one job"):
            await value(client.jobs.plot())
        assert len(server.seen) == seen, "refused before anything is fetched"
