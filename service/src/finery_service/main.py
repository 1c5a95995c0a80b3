"""`finery-service`: one program, one subcommand per process."""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

from finery_service.home import default_home
from finery_service.settings import Settings, required


def main(arguments: list[str] | None = None) -> None:
    """Exit status: 0 done or stopped on request, 1 a failure that the message explains, 2 wrong usage."""
    options = _parser().parse_args(arguments)
    options.run(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="finery-service", description=__doc__)
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    up = commands.add_parser("up", help="the whole system on this machine: PostgreSQL, Ray, and the processes below")
    up.add_argument("--home", type=Path, default=default_home(), help="folder for all data (default: %(default)s)")
    up.add_argument("--host", default="127.0.0.1", help="address of the API (default: %(default)s)")
    up.add_argument("--port", type=_port, default=8700, help="port of the API, 0 for any (default: %(default)s)")
    up.add_argument("--slots", type=_slots, help="jobs that train at once (default: one per GPU, at least 1)")
    up.add_argument("--tenant", metavar="NAME", help="create this tenant and write a key for it to HOME/tenant.key")
    up.set_defaults(run=_up)
    for name, run, text in (
        ("migrate", _migrate, "bring the database to the newest schema (FINERY_OWNER_DSN)"),
        ("api", _api, "the REST API"),
        ("rpc", _rpc, "the gRPC server that workers report to"),
        ("reconcile", _reconcile, "the loop that moves jobs"),
    ):
        commands.add_parser(name, help=text).set_defaults(run=run)
    key = commands.add_parser("create-operator-key", help="make a key for operators and print it once")
    key.add_argument("--name", default="operator")
    key.set_defaults(run=_create_operator_key)
    return parser


def _port(given: str) -> int:
    return _whole(given, 0, 65535)


def _slots(given: str) -> int:
    return _whole(given, 1, 1024)


def _whole(given: str, least: int, most: int) -> int:
    if not given.isdecimal() or not least <= int(given) <= most:
        raise argparse.ArgumentTypeError(f"expected a whole number from {least} to {most}, found {given!r}")
    return int(given)


def _up(options: argparse.Namespace) -> None:
    from finery_service.up import Options, run

    sys.exit(run(Options(options.home.absolute(), options.host, options.port, options.slots, options.tenant)))


def _migrate(_options: argparse.Namespace) -> None:
    from finery_service import logs
    from finery_service.db import migrate

    logs.configure("migrate")
    migrate.upgrade(required(Settings().owner_dsn, "FINERY_OWNER_DSN"))


def _api(_options: argparse.Namespace) -> None:
    from finery_service import logs
    from finery_service.app import serve

    logs.configure("api")
    serve(Settings())


def _rpc(_options: argparse.Namespace) -> None:
    from finery_service import logs
    from finery_service.rpc_server import serve

    logs.configure("rpc")
    serve(Settings())


def _reconcile(_options: argparse.Namespace) -> None:
    from finery_service import logs
    from finery_service.reconcile.loop import serve

    logs.configure("reconcile")
    serve(Settings())


def _create_operator_key(options: argparse.Namespace) -> None:
    from finery_service.auth.operator_key import create
    from finery_service.clock import system_clock

    system_dsn = required(Settings().system_dsn, "FINERY_SYSTEM_DSN")
    print(asyncio.run(create(system_dsn, options.name, system_clock())))


if __name__ == "__main__":
    main()
