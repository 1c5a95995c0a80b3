"""Progress, pictures and trackers of DPO and RL jobs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from finery.forward import measured, settings
from finery.plot import Evaluation, curve, loss_curve, picture, reward_curve
from finery.progress import JobView
from finery.types.jobs import Job

from .methods_history import DPO, RL, events
from .support import Client, Handler, Seen, client_of, event_json, job_json, page_json, serving, sse, value


def said(history: list[dict[str, Any]]) -> tuple[JobView, list[str]]:
    view = JobView()
    told = [view.take(event) for event in events(history)]
    return view, [one for one in told if one is not None]


def test_an_rl_job_tells_of_rewards_and_what_was_held_out() -> None:
    assert said(RL)[1] == [
        "prepared 500 prompts",
        "running: evaluating before training",
        "held-out reward 0.2500 (0.1250 to 0.5000), pass@4 50% before training",
        "held-out reward 0.7500 (0.5000 to 0.8750), pass@4 50% after step 2",
        "reward 0.25  2 +⏎ 2 = ␛[31m? → 4",
        "checkpoint ckpt_2 at step 2, held-out reward 0.7500 (best so far)",
        "held-out reward 0.7500, pass@4 50% after step 4",
        "checkpoint ckpt_4 at step 4, held-out reward 0.7500",
        "succeeded",
    ]
    at = [n for n, one in enumerate(RL) if one["type"] == "metric"]
    lines = [said(RL[: n + 1])[0].line() for n in at]
    rest = "100 tok/s  ETA"
    assert lines[0] == f"reward 0.125  held-out 0.250  loss -0.500  {rest} 0:06  $0.000012"
    assert lines[1].startswith("reward 0.500  held-out 0.250")
    assert lines[2].startswith("held-out 0.750  loss -0.500"), "no rollout of the step had a reward, which is not 0"
    assert lines[3].startswith("reward 0.875  held-out 0.750")


def test_a_dpo_job_tells_of_loss_margin_and_accuracy() -> None:
    view, told = said(DPO)
    assert told[:2] == ["prepared 32 pairs, 640 tokens to learn from, 1 left out", "running"]
    assert told[2:4] == [
        "held-out loss 0.6250, accuracy 75% after step 2",
        "checkpoint ckpt_2 at step 2, held-out loss 0.6250 (best so far)",
    ]
    assert view.line() == "loss 0.500  margin 0.250  accuracy 88%  100 tok/s  ETA 0:00  $0.000012"


def job(method: str, **changes: Any) -> Job:
    return Job.model_validate(job_json(method=method, name="bot", **changes))


def comments(path: Path) -> list[str]:
    """matplotlib writes each text of a picture as a comment beside its glyphs."""
    return [part.split(" -->", 1)[0].strip() for part in path.read_text(encoding="utf-8").split("<!-- ")[1:]]


def test_the_curve_of_an_rl_job_is_its_rewards() -> None:
    found = curve(job("rl"), events(RL))
    assert found.method == "rl"
    assert found.reward == ((1, 0.125), (2, 0.5), (4, 0.875))
    assert found.held_out_reward == (
        Evaluation(0, 0.25, 0.125, 0.5),
        Evaluation(2, 0.75, 0.5, 0.875),
        Evaluation(4, 0.75, None, None),
    )
    assert found.loss == found.validation == ()
    assert found.best == (2, 0.75), "of equals the earliest"
    assert curve(job("rl", best_checkpoint="ckpt_4"), events(RL)).best == (4, 0.75)


def test_a_picture_of_an_rl_job_has_rewards_with_their_intervals(tmp_path: Path) -> None:
    plot = picture([curve(job("rl"), events(RL))], tmp_path / "reward.svg")
    texts = comments(tmp_path / "reward.svg")
    for text in ("Reward of bot", "training reward (smoothed)", "held-out reward", "reward", "step"):
        assert text in texts
    assert "best checkpoint: 0.750 at step 2" in texts
    assert not [text for text in texts if "loss" in text]
    (axes,) = plot.figure.axes
    (bars,) = axes.containers
    ends = [[tuple(point) for point in segment] for segment in bars.lines[2][0].get_segments()]
    assert ends == [[(0, 0.125), (0, 0.5)], [(2, 0.5), (2, 0.875)]]
    assert plot._repr_html_().startswith('<img alt="rewards" src="data:image/png;base64,iVBOR')


def test_a_picture_of_a_dpo_job_has_loss_and_accuracy(tmp_path: Path) -> None:
    plot = picture([curve(job("dpo"), events(DPO))], tmp_path / "dpo.svg")
    texts = comments(tmp_path / "dpo.svg")
    for text in ("Loss of bot", "loss (nats per pair)", "accuracy", "training accuracy (smoothed)", "learning rate"):
        assert text in texts
    assert len(plot.figure.axes) == 3
    # Span 3, weight ½, corrected: ½, then (¼·½ + ½·⅞) / ¾ = ¾.
    drawn = [list(line.get_ydata()) for line in plot.figure.axes[1].lines]
    assert drawn == [[0.5, 0.875], pytest.approx([0.5, 0.75]), [0.75]]


def test_jobs_of_several_methods_share_a_picture(tmp_path: Path) -> None:
    curves = [curve(job("rl"), events(RL)), curve(job("dpo", id="job_2"), events(DPO))]
    plot = picture(curves, tmp_path / "both.png")
    assert [axes.get_ylabel() for axes in plot.figure.axes] == [
        "reward",
        "loss (nats per pair)",
        "accuracy",
        "learning rate",
    ]
    assert plot.figure.axes[0].get_title(loc="left") == "Rewards and losses of 2 jobs"


def test_a_curve_comes_from_events_alone_and_only_of_what_they_have(tmp_path: Path) -> None:
    path = reward_curve(iter(events(RL)), tmp_path / "reward.png", title="Words")
    assert path.read_bytes().startswith(b"\x89PNG")
    loss_curve(events(DPO), tmp_path / "loss.svg")
    assert "Loss of job_1" in comments(tmp_path / "loss.svg")
    with pytest.raises(
        ValueError, match="expected the events of a job with a reward, found those of a job with method dpo"
    ):
        reward_curve(events(DPO), tmp_path / "x.png")
    with pytest.raises(
        ValueError, match="expected the events of a job with a loss, found those of a job with method rl"
    ):
        loss_curve(events(RL), tmp_path / "x.png")
    with pytest.raises(ValueError, match="nothing to draw"):
        reward_curve(events([RL[0], RL[10]]), tmp_path / "x.png")
    assert not (tmp_path / "x.png").exists()


async def test_a_client_draws_what_the_method_has(kind: Client, tmp_path: Path) -> None:
    def reply(handler: Handler, seen: Seen) -> None:
        handler.json(200, page_json(RL) if "/events" in seen.path else job_json(method="rl", name="bot"))

    with serving(reply) as server:
        await value(client_of(kind, server).jobs.plot("job_1", path=tmp_path / "reward.svg"))
    assert "Reward of bot" in comments(tmp_path / "reward.svg")


def test_rewards_and_evaluations_are_forwarded_and_samples_are_not() -> None:
    told = [measured(event) for event in events(RL)]
    assert told[2] == {
        "validation/tokens": 64.0,
        "validation/reward": 0.25,
        "validation/reward_low": 0.125,
        "validation/reward_high": 0.5,
        "validation/pass_at_4": 0.5,
        "validation/pass_at_4_low": 0.25,
        "validation/pass_at_4_high": 0.75,
    }
    assert (told[3]["train/reward"], told[3]["train/loss"], told[3]["train/cost"]) == (0.125, -0.5, 0.000012)
    assert "train/reward" not in told[10], "no reward is not 0"
    assert told[5] == told[6] == told[8] == told[9] == {}
    dpo = [measured(event) for event in events(DPO)]
    assert (dpo[2]["train/margin"], dpo[2]["train/accuracy"]) == (0.0, 0.5)
    assert dpo[4] == {
        "validation/loss": 0.625,
        "validation/tokens": 90.0,
        "validation/accuracy": 0.75,
        "validation/margin": 0.125,
    }


def test_an_environment_is_among_the_settings_without_its_source() -> None:
    gym = {
        "type": "reasoning_gym",
        "task": "chain_sum",
        "config": {"max_terms": 3},
        "seed": 7,
        "system_prompt": "x" * 9,
    }
    found = settings(job("rl", training_file=None, environment=gym, environment_id="env_1"))
    assert (found["environment.task"], found["environment.seed"], found["environment_id"]) == ("chain_sum", 7, "env_1")
    assert found["environment.config.max_terms"] == 3
    grader = {"type": "python", "source": "def grade(sample, item): …"}
    found = settings(job("rl", environment={"type": "prompts", "file": "file_1", "grader": grader}))
    assert (found["environment.file"], found["environment.grader.type"]) == ("file_1", "python")
    assert grader["source"] not in found.values()


async def test_a_job_of_rewards_is_waited_for_with_progress(kind: Client, capsys: pytest.CaptureFixture[str]) -> None:
    def reply(handler: Handler, seen: Seen) -> None:
        if "/events" in seen.path:
            handler.stream()
            handler.wfile.write(sse(*RL, done=True))
        else:
            handler.json(200, job_json(method="rl", state="succeeded"))

    with serving(reply) as server:
        await value(client_of(kind, server).jobs.wait("job_1", progress=True))
    drawn = capsys.readouterr().err
    assert "step 4/4  reward 0.875  held-out 0.750" in drawn
    assert "held-out reward 0.7500 (0.5000 to 0.8750)" in drawn


@pytest.mark.parametrize("type_", ["metric", "eval", "checkpoint", "rollout", "prepared"])
def test_an_event_with_hardly_anything_in_it_does_no_harm(type_: str) -> None:
    view = JobView()
    event = events([event_json(1, type_, step=1)])[0]
    view.take(event)
    measured(event)
    assert "loss –" in view.line() or view.line() == ""
