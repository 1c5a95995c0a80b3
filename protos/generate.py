"""Regenerates the gRPC messages from the .proto files; `--check` fails when the committed ones differ."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCE = Path(__file__).parent / "src"


def generate(out: Path) -> None:
    protos = sorted(str(path.relative_to(SOURCE)) for path in SOURCE.glob("finery_protos/v1/*.proto"))
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    outputs = [f"--{kind}_out={out}" for kind in ("python", "grpc_python", "mypy", "mypy_grpc")]
    subprocess.run(
        [sys.executable, "-m", "grpc_tools.protoc", f"-I{SOURCE}", *outputs, *protos], check=True, env=environment
    )


def main() -> int:
    if "--check" not in sys.argv:
        generate(SOURCE)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        stale = [
            fresh.name
            for fresh in sorted(Path(folder).rglob("*.py*"))
            if not (old := SOURCE / fresh.relative_to(folder)).exists() or old.read_bytes() != fresh.read_bytes()
        ]
    if stale:
        print(f"generated code differs from the .proto files: {', '.join(stale)}; run `make protos`")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
