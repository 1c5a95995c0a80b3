"""What the control plane of worker tests finds in the store of what a worker says is there."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import grpc

from finery_protos.v1 import worker_pb2 as pb


class Refused(Exception):  # noqa: N818 - an answer, not an accident
    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        super().__init__(message)
        self.code = code


def must(condition: bool, message: str) -> None:
    if not condition:
        raise Refused(grpc.StatusCode.FAILED_PRECONDITION, message)


def read(store: Path, below: str, key: str) -> bytes:
    """An object that has to lie under the prefix `below`."""
    must(key.startswith(below), f"{key} is not the attempt's")
    must((store / key).is_file(), f"{key} is not in the store")
    return (store / key).read_bytes()


def check_checkpoint(store: Path, below: str, request: pb.PublishCheckpointRequest) -> None:
    for file in request.files:
        content = read(store, below, request.prefix + file.path)
        must(hashlib.sha256(content).hexdigest() == file.sha256, f"sha256 of {file.path}")
        must(len(content) == file.bytes, f"size of {file.path}")
    index = read(store, below, f"{request.resume_prefix}index.json")
    must(hashlib.sha256(index).hexdigest() == request.resume_sha256, "sha256 of the resume index")
    json.loads(request.manifest_json, parse_constant=lambda name: must(False, f"{name} in the manifest"))


def check_rollouts(store: Path, below: str, step: pb.Step) -> None:
    for name in ("rollouts", "evaluation_rollouts"):
        if step.HasField(name):
            file: pb.RolloutFile = getattr(step, name)
            content = read(store, below, file.key)
            must(hashlib.sha256(content).hexdigest() == file.sha256, f"sha256 of {file.key}")
            must(len(content) == file.bytes and content.count(b"\n") == file.count, f"size of {file.key}")
