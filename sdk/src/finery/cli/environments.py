"""`finery environments`"""

from __future__ import annotations

import json as jsons
from pathlib import Path
from typing import Annotated, Any

import typer

from finery import graders
from finery.cli import spec as specs
from finery.cli.files import Limit, file_id
from finery.cli.output import AsJson, client, err, print_facts, print_json, print_table
from finery.client import Finery
from finery.types.environments import Environment

app = typer.Typer(no_args_is_help=True)
EnvironmentId = Annotated[str, typer.Argument(metavar="ENVIRONMENT", help="Its id.")]
Reward = Annotated[
    Path | None,
    typer.Option("--reward-file", exists=True, dir_okay=False, help="Python with `def grade(sample, item)`."),
]


@app.command()
def create(
    type: Annotated[str | None, typer.Option(help="reasoning_gym or prompts.")] = None,  # noqa: A002 (the option's name)
    task: Annotated[str | None, typer.Option(help="Of reasoning-gym, as in chain_sum.")] = None,
    file: Annotated[str | None, typer.Option(metavar="FILE", help="Prompts: an id, or a path to upload.")] = None,
    held_out_file: Annotated[
        str | None, typer.Option(metavar="FILE", help="Prompts that are only evaluated on.")
    ] = None,
    reward_file: Reward = None,
    set: Annotated[  # noqa: A002 (the option's name)
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="Any field (size=200, grader.operation=like).")
    ] = None,
    spec: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="The spec as JSON; other options override it.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="For people.")] = None,
    project: Annotated[str | None, typer.Option(help="Another project than the key's, by its id.")] = None,
    json: AsJson = False,
) -> None:
    """Keep an environment: prompts, and what rewards an answer."""
    body = read(spec)
    body.update({key: found for key, found in (("type", type), ("task", task)) if found is not None})
    try:
        for assignment in set or []:
            specs.put(body, assignment)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    reward(body, reward_file)
    with client() as finery:
        upload(finery, body, file=file, held_out_file=held_out_file)
        made = finery.environments.create(body, name=name, project=project)
    show(made, json)
    err.print(f"[dim]Try it: finery environments run {made.id} ANSWER[/dim]")


@app.command("list")
def list_(
    project: Annotated[str | None, typer.Option(help="Only this project, by its id.")] = None,
    limit: Limit = 20,
    json: AsJson = False,
) -> None:
    """Newest first."""
    with client() as finery:
        found = finery.environments.list(project=project, limit=min(limit, 100))
        environments = [one for one, _ in zip(found, range(limit), strict=False)]
    if json:
        print_json(environments)
    else:
        rows = ((one.id, one.name, one.type, one.created_at) for one in environments)
        print_table(("id", "name", "type", "created"), rows)


@app.command()
def get(environment: EnvironmentId, json: AsJson = False) -> None:
    """Its spec."""
    with client() as finery:
        show(finery.environments.retrieve(environment), json)


@app.command()
def run(
    environment: EnvironmentId,
    answers: Annotated[list[str] | None, typer.Argument(metavar="ANSWER...", help="Texts to grade.")] = None,
    prompt: Annotated[int, typer.Option(help="The prompt that they answer, by its place.", min=0)] = 0,
    file: Annotated[
        Path | None,
        typer.Option("--answers", exists=True, dir_okay=False, help='JSON lines: "text" or {"prompt", "output_text"}.'),
    ] = None,
    prompts: Annotated[int, typer.Option(help="How many prompts to show.", min=0, max=100)] = 5,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for a worker.")] = 300.0,
    html: Annotated[Path | None, typer.Option(dir_okay=False, help="Write a page instead of printing.")] = None,
    json: AsJson = False,
) -> None:
    """Grade answers before a job is started, and look at prompts."""
    given: list[Any] = [(prompt, answer) for answer in answers or []]
    given += _read_answers(file) if file is not None else []
    with client() as finery, err.status("waiting for a worker"):
        found = finery.environments.run(environment, given, prompts=prompts, timeout=timeout)
    if html is not None:
        html.write_text(found.html(), encoding="utf-8")
        err.print(f"{html} written", markup=False, highlight=False)
    if json:
        print_json(found)
    elif html is None:
        typer.echo(found.text(), color=True)


@app.command()
def delete(environments: Annotated[list[str], typer.Argument(metavar="ENVIRONMENT...", help="Ids.")]) -> None:
    """Delete for good; jobs keep theirs as it was."""
    with client() as finery:
        for environment in environments:
            finery.environments.delete(environment)
            err.print(f"{environment} deleted", markup=False, highlight=False)


def of_job(body: dict[str, Any], source: str | None, reward_file: Path | None) -> None:
    """What options of a job say of its environment: an id, or a spec as JSON; its grader may be a reward file."""
    if source is not None and Path(source).is_file():
        body["environment"] = read(Path(source))
    elif source is not None and source.startswith("env_"):
        body["environment"] = source
    elif source is not None:
        raise typer.BadParameter(f"expected the id of an environment or the path of a spec, found {source!r}")
    if reward_file is not None:
        if not isinstance(body.get("environment"), dict):
            raise typer.BadParameter(
                "expected --environment, the path of a spec, next to --reward-file. Or keep one with `finery "
                "environments create --file PROMPTS --reward-file FILE`, and pass its id alone"
            )
        reward(body["environment"], reward_file)


def read(spec: Path | None) -> dict[str, Any]:
    try:
        return {} if spec is None else specs.load(spec)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def reward(body: dict[str, Any], reward_file: Path | None) -> None:
    """Let the file be the grader; what the spec says of it beside the source (timeout_seconds) stays."""
    if reward_file is not None:
        said = body.get("grader") if isinstance(body.get("grader"), dict) else {}
        body["grader"] = {**(said or {}), "type": "python", "source": graders.python(reward_file).source}


def upload(finery: Finery, body: dict[str, Any], **files: str | None) -> None:
    """Ids into the spec; and its type, where only one has such fields."""
    for field, source in files.items():
        if source is not None:
            body[field] = file_id(finery, source)
    if "type" not in body and ("task" in body or "file" in body):
        body["type"] = "reasoning_gym" if "task" in body else "prompts"


def show(environment: Environment, as_json: bool) -> None:
    if as_json:
        print_json(environment)
        return
    facts: list[tuple[str, object]] = [("id", environment.id), ("name", environment.name), ("type", environment.type)]
    facts += [(name, _plain(value)) for name, value in environment.spec.items() if name != "type"]
    print_facts([*facts, ("created", environment.created_at)])


def _plain(value: object) -> object:
    return jsons.dumps(value, ensure_ascii=False) if isinstance(value, (dict, list)) and value else value or None


def _read_answers(file: Path) -> list[Any]:
    try:
        lines = file.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise typer.BadParameter(f"{file}: expected UTF-8: {error}") from None
    return [_read_answer(line, f"{file}, line {n}") for n, line in enumerate(lines, start=1) if line.strip()]


def _read_answer(line: str, place: str) -> Any:
    try:
        return jsons.loads(line)
    except jsons.JSONDecodeError as error:
        raise typer.BadParameter(f"{place}: expected a text or an object as JSON: {error}") from None
