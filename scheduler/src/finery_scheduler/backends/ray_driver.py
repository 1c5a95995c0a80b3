"""The Ray driver: a child of the control plane, spoken to in JSON lines over stdin and stdout.

It holds nothing: the record of an attempt is a detached placement group named `<namespace>/<attempt>`, its worker a
detached actor named `<attempt>`. So it may die at any time; the next one finds all by name. A request is
`{"id", "call", "arguments"}`, a reply `{"id", "result"}` or `{"id", "error": {"kind": "launch" | "pool", "message"}}`.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import ActorDiedError, GetTimeoutError, RuntimeEnvSetupError
from ray.util import list_named_actors
from ray.util.placement_group import (
    PlacementGroup,
    get_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from finery_scheduler.backends.processes import kill_attempt
from finery_scheduler.backends.worker import MARK, Worker

SLOT = "worker_slot"
CPU_SHARE = 0.001
"""Ray shall not ration CPUs between workers; slots do."""
START_SECONDS = 60.0
RECOUNT_SECONDS = 60.0
"""Ray keeps a row of every placement group that ever was (40 µs each to list), so the full list is read rarely."""
SWEEP_SECONDS = 20.0


class LaunchRefused(Exception):  # noqa: N818 - crosses the pipe as kind "launch"
    """The attempt cannot start here."""


class Driver:
    """The calls of the protocol, each in a thread of its own; calls for one attempt exclude each other."""

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace
        self._locks = [threading.Lock() for _ in range(64)]
        self._launching: set[str] = set()
        self._known: set[str] = set()  # attempts with a record; `stop` alone takes one out
        self._recount_at = 0.0

    def nodes(self) -> list[dict[str, Any]]:
        return [
            {"id": node["NodeID"], "slots": int(node["Resources"][SLOT]), "accelerator_type": _accelerator(node)}
            for node in sorted(ray.nodes(), key=lambda node: str(node["NodeID"]))
            if node["Alive"] and node["Resources"].get(SLOT)
        ]

    def workers(self) -> dict[str, str]:
        if time.monotonic() >= self._recount_at:
            self._known |= self._records()
            self._recount_at = time.monotonic() + RECOUNT_SECONDS
        known, launching = set(self._known), set(self._launching)
        alive = {row["name"] for row in list_named_actors(all_namespaces=True) if row["namespace"] == self._namespace}
        alive |= launching & known
        return {attempt: "alive" if attempt in alive else "dead" for attempt in sorted(alive | known)}

    def launch(
        self,
        attempt: str,
        entrypoint: str,
        environment: dict[str, str],
        placements: list[dict[str, Any]],
        grant_seconds: float,
    ) -> None:
        with self._lock(attempt):
            self._launching.add(attempt)
            try:
                if self._adopt(attempt, entrypoint, environment):
                    return
                self._check_fits(placements)
                self._place(attempt, placements, grant_seconds)
                self._begin(attempt, entrypoint, environment, placements)
            except LaunchRefused:
                self._remove(attempt)
                raise
            finally:
                self._launching.discard(attempt)

    def stop(self, attempt: str) -> None:
        with self._lock(attempt):
            self._remove(attempt)

    def _adopt(self, attempt: str, entrypoint: str, environment: dict[str, str]) -> bool:
        """Whether the attempt is known already. A driver may have died before its worker was told what to run."""
        if self._record(attempt) is None:
            return False
        self._known.add(attempt)
        # ValueError: no such actor, so it is dead, and an attempt is tried once. No answer: busy, and started long ago.
        with suppress(ValueError, GetTimeoutError):
            _start(ray.get_actor(attempt, namespace=self._namespace), entrypoint, environment)
        return True

    def _check_fits(self, placements: list[dict[str, Any]]) -> None:
        slots = {node["id"]: node["slots"] for node in self.nodes()}
        for placement in placements:
            if placement["node"] not in slots:
                raise LaunchRefused(f"node {placement['node']} is not in the pool")
            if placement["slots"] > slots[placement["node"]]:
                have = slots[placement["node"]]
                raise LaunchRefused(f"{placement['slots']} slots on node {placement['node']}: it has {have}")

    def _place(self, attempt: str, placements: list[dict[str, Any]], seconds: float) -> None:
        """Reserve the whole gang, each part on the node that the plan chose."""
        group = placement_group(
            [{"CPU": CPU_SHARE, SLOT: p["slots"], **_gpus(p)} for p in placements] or [{"CPU": CPU_SHARE}],
            strategy="PACK",
            name=self._record_name(attempt),
            lifetime="detached",
            bundle_label_selector=[{"ray.io/node-id": p["node"]} for p in placements] or None,
        )
        self._known.add(attempt)
        if not group.wait(seconds):
            asked = ", ".join(f"{p['slots']} on {p['node']}" for p in placements) or "a CPU"
            raise LaunchRefused(f"the pool did not grant {asked} within {seconds:.0f} s: slots are in use")

    def _begin(
        self, attempt: str, entrypoint: str, environment: dict[str, str], placements: list[dict[str, Any]]
    ) -> None:
        named = type(f"worker_{attempt}", (Worker,), {})  # Ray titles the process by the class
        actor = (
            ray.remote(named)
            .options(
                name=attempt,
                namespace=self._namespace,
                lifetime="detached",
                max_restarts=0,
                max_concurrency=2,
                num_cpus=CPU_SHARE,
                num_gpus=_gpus(placements[0]).get("GPU", 0) if placements else 0,
                runtime_env={"env_vars": {MARK: attempt}},
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    get_placement_group(self._record_name(attempt)), placement_group_bundle_index=0
                ),
            )
            .remote()
        )
        try:
            _start(actor, entrypoint, environment)
        except GetTimeoutError as late:
            raise LaunchRefused(f"the worker did not load its entrypoint within {START_SECONDS:.0f} s") from late

    def _remove(self, attempt: str) -> None:
        """Processes first, then the slots: nobody gets a slot on which something still runs."""
        record = self._record(attempt)
        actor = None
        with suppress(ValueError):
            actor = ray.get_actor(attempt, namespace=self._namespace)
        nodes = set(placement_group_table(record)["bundles_to_node_id"].values()) - {""} if record else set()
        self._sweep(attempt, nodes)
        if actor is not None:
            ray.kill(actor, no_restart=True)
            self._sweep(attempt, nodes)  # what a worker that was just starting may have become meanwhile
        if record is not None:
            remove_placement_group(record)
        self._known.discard(attempt)

    def _sweep(self, attempt: str, nodes: set[str]) -> None:
        alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        sweep = ray.remote(kill_attempt)
        ray.get(
            [
                sweep.options(
                    num_cpus=0, max_retries=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)
                ).remote(attempt)
                for node in sorted(nodes & alive)
            ],
            timeout=SWEEP_SECONDS,
        )

    def _record(self, attempt: str) -> PlacementGroup | None:
        with suppress(ValueError):
            return get_placement_group(self._record_name(attempt))
        return None

    def _records(self) -> set[str]:
        prefix = self._record_name("")
        return {
            row["name"].removeprefix(prefix)
            for row in placement_group_table().values()
            if row["name"].startswith(prefix) and row["state"] != "REMOVED"
        }

    def _record_name(self, attempt: str) -> str:
        return f"{self._namespace}/{attempt}"

    def _lock(self, attempt: str) -> threading.Lock:
        return self._locks[hash(attempt) % len(self._locks)]


def _start(actor: Any, entrypoint: str, environment: dict[str, str]) -> None:
    """Tell the worker what to run; the environment travels as a method's argument, which Ray logs nowhere."""
    try:
        error = ray.get(actor.start.remote(entrypoint, environment), timeout=START_SECONDS)
    except ActorDiedError:
        return  # `workers` says that it is dead
    except RuntimeEnvSetupError as broken:
        raise LaunchRefused("the node could not prepare the worker's process; see its runtime_env log") from broken
    if error is not None:
        raise LaunchRefused(error)


def _accelerator(node: dict[str, Any]) -> str | None:
    label = node.get("Labels", {}).get("ray.io/accelerator-type")
    return label or next((r.split(":", 1)[1] for r in node["Resources"] if r.startswith("accelerator_type:")), None)


def _gpus(placement: dict[str, Any]) -> dict[str, float]:
    """Where Ray sees GPUs, a slot is one of them, and Ray tells the worker which."""
    for node in ray.nodes():
        if node["NodeID"] == placement["node"] and node["Resources"].get("GPU"):
            return {"GPU": placement["slots"]}
    return {}


class Pipe:
    """Requests in, replies out; the end of the input is the parent's death and ends this process at once."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # whatever Ray's native part prints must not land among the replies
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - Ray prints a paragraph for each worker that ended
        self._lock = threading.Lock()

    def send(self, reply: dict[str, Any]) -> None:
        with self._lock:
            print(json.dumps(reply), file=self._out, flush=True)

    def read(self, driver: Driver) -> None:
        threads = ThreadPoolExecutor(max_workers=32)
        for line in sys.stdin:
            threads.submit(self._answer, driver, json.loads(line))
        os._exit(0)

    def _answer(self, driver: Driver, request: dict[str, Any]) -> None:
        try:
            self.send({"id": request["id"], "result": getattr(driver, request["call"])(**request["arguments"])})
        except LaunchRefused as error:
            self.send({"id": request["id"], "error": {"kind": "launch", "message": str(error)}})
        except Exception as error:
            traceback.print_exc()
            message = f"{request['call']}: {type(error).__name__}: {error}"
            self.send({"id": request["id"], "error": {"kind": "pool", "message": message}})


def main() -> None:
    """`python -m finery_scheduler.backends.ray_driver ADDRESS NAMESPACE`; the cluster's token is in RAY_AUTH_TOKEN."""
    address, namespace = sys.argv[1:]
    pipe = Pipe()
    reader = threading.Thread(target=pipe.read, args=(Driver(namespace),), name="requests", daemon=True)
    reader.start()
    ray.init(address=address, namespace=namespace, log_to_driver=False, configure_logging=False)
    pipe.send({"id": 0, "result": "ready"})
    reader.join()


if __name__ == "__main__":
    main()
