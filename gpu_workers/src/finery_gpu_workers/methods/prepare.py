"""Preparation, before any accelerator is taken: download, render, count, store, quote.

For RL the graders are opened once. What is rendered and how is `data/`, in a child (`rendering_child.py`).
"""

from __future__ import annotations

import json
import os
from datetime import datetime
from typing import Any

from pydantic import TypeAdapter

from finery.types.data import DataReport
from finery.types.environments import EnvironmentSpec, PromptsEnvironment
from finery.types.errors import ErrorDetail
from finery.types.files import FileEncoding
from finery.types.methods import RlHyperparameters, SftHyperparameters
from finery.types.reasons import JobReason
from finery_gpu_workers import storage
from finery_gpu_workers.data import prepared
from finery_gpu_workers.data.chat import template_sha256
from finery_gpu_workers.data.cutting import NO_TRAINABLE_TOKENS, TOO_LONG
from finery_gpu_workers.data.packing import Plan
from finery_gpu_workers.data.preference import Pairs
from finery_gpu_workers.data.request import PARAMS, Request, Upload
from finery_gpu_workers.data.tokens import tokenizer_sha256
from finery_gpu_workers.errors import WorkerError
from finery_gpu_workers.methods.rendering_child import Limits, refused, run_child
from finery_gpu_workers.models.catalog import longest_row
from finery_gpu_workers.start import check_bases, tokenizer_folder, vocabulary
from finery_gpu_workers.work import Ending, Work

_ENVIRONMENT: TypeAdapter[EnvironmentSpec] = TypeAdapter(EnvironmentSpec)


def prepare(work: Work, now: datetime, limits: Limits | None = None) -> Ending | None:
    """None when the data is prepared, stored and reported; otherwise why the job ends."""
    request = request_of(work, now, method=work.spec.method, **_settings(work))
    result = run_child(work, request, limits or Limits())
    if isinstance(result, Ending):
        return result
    if ending := refused(result, request.params) or _nothing_to_train(result, request):
        return ending
    for name, entry in result["sets"].items():
        _check_ids(name, entry["highest_token"], request)
    data = prepared.load(request.output)
    _check_lengths(work, data)
    if work.spec.method == "rl":
        _check_rewards(work)
    _report(work, request, DataReport.model_validate(result["report"]), data)
    return None


def _settings(work: Work) -> dict[str, Any]:
    hyper = work.spec.hyperparameters
    if isinstance(hyper, RlHyperparameters):
        return {"max_length": hyper.max_prompt_tokens, "truncation": "drop", "held_out": hyper.eval_prompts}
    settings = {"max_length": hyper.max_length, "truncation": hyper.truncation}
    return settings | ({"train_on": hyper.train_on} if isinstance(hyper, SftHyperparameters) else {})


def request_of(work: Work, now: datetime, **settings: Any) -> Request:
    """What the child is to do; `settings` are max_length, truncation and perhaps others of `Request`."""
    check_bases(work)
    output = work.folder / "prepared"
    output.mkdir()
    files = _files(work, settings.get("held_out"))
    return Request(
        **{"added_tokens": work.spec.added_tokens, "preview": None} | settings,
        tokenizer_folder=tokenizer_folder(work),
        vocabulary=vocabulary(work).rows,
        files=files,
        params=_params(work, files),
        output=output,
        now=now,
        parent=os.getpid(),
    )


def _files(work: Work, held_out: int | None) -> dict[str, Upload]:
    """`held_out`: how many prompts of RL are, 0 of which need no file."""
    given = work.assignment
    if given.environment_json and not given.training_key:
        return {"train": _made_prompts(work, held_out or 0)}
    files = {"train": (given.training_key, given.training_sha256, given.training_encoding)}
    if given.validation_key and held_out != 0:
        files["validation"] = (given.validation_key, given.validation_sha256, given.validation_encoding)
    uploads = {}
    for name, (key, sha256, encoding) in files.items():
        read_as: FileEncoding = "parquet" if encoding == "parquet" else "jsonl"
        uploads[name] = Upload(path=work.folder / f"{name}.{read_as}", encoding=read_as)
        storage.download(work.store, key, uploads[name].path, sha256)
    return uploads


def _params(work: Work, files: dict[str, Upload]) -> dict[str, str]:
    """The fields of the job that name its files."""
    if not work.assignment.environment_json:
        return PARAMS
    if "validation" in files:
        return {"train": "environment.file", "validation": "environment.held_out_file"}
    return dict.fromkeys(PARAMS, "environment.file" if work.assignment.training_key else "environment")


def environment_of(work: Work) -> EnvironmentSpec:
    return _ENVIRONMENT.validate_json(work.assignment.environment_json)


def _made_prompts(work: Work, held_out: int) -> Upload:
    """Those of an environment that makes its own."""
    from finery_gpu_workers.environments.prompts import write_prompts

    environment = environment_of(work)
    assert not isinstance(environment, PromptsEnvironment)
    path = work.folder / "prompts.jsonl"
    write_prompts(environment, environment.size + held_out, path, work.folder)
    return Upload(path=path, encoding="jsonl")


def _check_rewards(work: Work) -> None:
    """Graders that cannot be opened end the job here, and not after the wait for an accelerator."""
    from finery_gpu_workers.environments.rewards import open_rewards

    open_rewards(environment_of(work), work.folder, workers=1, score_models=work.score_models).close()


def _nothing_to_train(result: dict[str, Any], request: Request) -> Ending | None:
    for name, report in result["report"]["sets"].items():
        if not report["rows"]:
            nothing = _no_prompts if request.method == "rl" else _nothing_left
            return Ending(JobReason.NO_TRAINABLE_TOKENS, nothing(report, request.params[name], request))
    return None


def _no_prompts(report: dict[str, Any], param: str, request: Request) -> ErrorDetail:
    dropped = report["dropped"]
    reasons = ", ".join(f"{count} {reason}" for reason, count in dropped.items())
    why = f"all {report['dropped_rows']} are left out ({reasons})" if dropped else "the file has none for it"
    message = f"Expected prompts to train on, and to evaluate on if any are held out, found none in one set: {why}."
    if request.held_out:
        message += f" {request.held_out} prompts are to be held out (hyperparameters.eval_prompts)."
    if TOO_LONG in dropped:
        longest = f"the longest has {report['longest']} tokens"
        message += f" {longest}, of hyperparameters.max_prompt_tokens, {request.max_length}."
    return ErrorDetail(
        message=message,
        type="invalid_request_error",
        code="no_prompts",
        param=param,
        details=[{"dropped_rows": report["dropped_rows"], "lines": report["dropped_lines"]}],
    )


def _nothing_left(report: dict[str, Any], param: str, request: Request) -> ErrorDetail:
    reasons = ", ".join(f"{count} {reason}" for reason, count in report["dropped"].items())
    max_length = request.max_length
    longest, limit = report["longest"], f"hyperparameters.max_length, {max_length}"
    why = []
    if TOO_LONG in report["dropped"]:
        why.append(f"Rows longer than {limit}, are left out by truncation drop; the longest has {longest} tokens.")
    if NO_TRAINABLE_TOKENS in report["dropped"]:
        why.append(
            "Rows have nothing to train where weights are 0, labels are -100, a row is a single token, or train_on "
            "means none of their parts."
        )
        if longest > max_length and TOO_LONG not in report["dropped"]:
            why.append(f"Rows also lose their tokens where they are cut at {limit}; the longest has {longest} tokens.")
    return ErrorDetail(
        message=f"Expected rows with tokens to train on, found none: all {report['dropped_rows']} rows are left out "
        f"({reasons or 'no rows'}). {' '.join(why)}",
        type="invalid_request_error",
        code="no_trainable_tokens",
        param=param,
        details=[{"dropped_rows": report["dropped_rows"], "lines": report["dropped_lines"]}],
    )


def _report(work: Work, request: Request, report: DataReport, data: prepared.Prepared) -> None:
    total_steps, total_trained = _quote(work, data)
    prefix = work.assignment.output_prefix + "prepared/"
    storage.upload_all(work.store, request.output, prefix)
    train = report.sets["train"]
    work.control.report_prepared(
        prepared_prefix=prefix,
        rows=train.rows,
        tokens=train.tokens,
        trained_tokens=train.trained_tokens,
        dropped_rows=train.dropped_rows,
        truncated_rows=train.truncated_rows,
        total_steps=total_steps,
        total_trained_tokens=total_trained,
        statistics_json=report.model_dump_json(),
    )


def _quote(work: Work, data: prepared.Prepared) -> tuple[int, int]:
    """Steps, and trained tokens over all of them; of RL, whose answers are not written yet, at most so many."""
    hyper = work.spec.hyperparameters
    if isinstance(hyper, RlHyperparameters):
        answers = hyper.steps * hyper.prompts_per_step * hyper.samples_per_prompt
        return hyper.steps, answers * hyper.max_new_tokens
    rows = Pairs(data.train) if work.spec.method == "dpo" else data.train
    plan = Plan(rows.lengths, hyper, work.spec.seed)
    return plan.total_steps, plan.total(rows.trained)


def _check_ids(name: str, highest: int, request: Request) -> None:
    """Here, and not by a fault on an accelerator."""
    if highest >= request.vocabulary:
        expected = f"token ids below {request.vocabulary}, the rows of the embedding matrix"
        folder = request.tokenizer_folder.name
        raise WorkerError("invalid_model", f"{folder}: expected {expected}, found {highest} in the {name} data")


def _check_lengths(work: Work, data: prepared.Prepared) -> None:
    """Here, and not after the wait for an accelerator."""
    limit, hyper = longest_row(work.model_folder), work.spec.hyperparameters
    found = max(int(one.lengths.max(initial=0)) for one in (data.train, data.validation) if one)
    param, what = "hyperparameters.max_length", "rows"
    if isinstance(hyper, RlHyperparameters):
        found += hyper.max_new_tokens
        param, what = "hyperparameters.max_new_tokens", "prompts with their answers"
    if limit is not None and found > limit:
        message = f"expected {what} of at most {limit} tokens, which this model sees whole, found one of {found}"
        raise WorkerError("row_too_long_for_model", f"{message}; lower {param}", param=param)


def load_prepared(work: Work) -> prepared.Prepared:
    """The prepared data on a training worker; it must be of this worker's tokenizer and template."""
    folder, tokenizer = work.folder / "prepared", tokenizer_folder(work)
    prefix = work.assignment.prepared_prefix
    index = json.loads(storage.read(work.store, prefix + prepared.INDEX))
    files = [(file["path"], file["sha256"]) for entry in index["sets"].values() for file in prepared.files_of(entry)]
    storage.download_all(work.store, prefix, [(prepared.INDEX, None), *files], folder)
    expected = {"tokenizer": tokenizer_sha256(tokenizer)}
    if index["template_sha256"] is not None:
        expected["template"] = template_sha256(tokenizer)
    for name, digest in expected.items():
        if index[f"{name}_sha256"] != digest:
            message = f"{name}: expected {digest}, found data prepared with {index[f'{name}_sha256']}"
            raise WorkerError("model_changed", message)
    return prepared.load(folder)
