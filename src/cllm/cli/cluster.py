"""`cllm cluster`: a server on many machines (docs/cluster.md). cluster/ does the work, and needs Ray."""

from __future__ import annotations

import logging
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cllm.cli.command_list import CommandList
from cllm.cli.options import BackendOption, ModelOption, SetOption, load_settings, open_console, print_status
from cllm.errors import ConfigError
from cllm.observe.json_option import JsonOption, write_or_show

if TYPE_CHECKING:
    from cllm.cluster.models import ClusterModel
    from cllm.cluster.overview import DeploymentRow, Overview, ReplicaRow
    from cllm.cluster.ray_node import RayNode
    from cllm.config import Config

log = logging.getLogger("cllm.cluster")

WATCH_S = 2.0
ONE_SIGNAL_S = 0.3
"""Signals closer together than this count as one: Ctrl-C may arrive from the terminal and from the parent process."""

app = typer.Typer(
    cls=CommandList,
    help="Serve on many machines, with Ray (needs the extra `cluster`).",
    no_args_is_help=True,
    rich_markup_mode=None,
)

AddressOption = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT",
        help="Ray cluster to use, or auto for any that runs on this machine. [default: the one started here]",
        show_default=False,
    ),
]


@app.command()
def up(
    config_file: Annotated[
        Path | None, typer.Argument(metavar="[CONFIG]", help="YAML configuration file.", show_default=False)
    ] = None,
    model: ModelOption = None,
    backend: BackendOption = None,
    replicas: Annotated[int | None, typer.Option("--replicas", "-n", help="Number of replicas. [default: 1]")] = None,
    host: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Address to listen on. [default: 127.0.0.1]")
    ] = None,
    port: Annotated[int | None, typer.Option("--port", "-p", help="Port to listen on. [default: 8000]")] = None,
    assignments: SetOption = None,
    address: AddressOption = None,
    join: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Add this machine to the cluster of another one, instead of starting one.",
            show_default=False,
        ),
    ] = None,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Return when it is ready; it runs on.")] = False,
) -> None:
    """Start a cluster on this machine and serve, until Ctrl-C. If it is already running, update it: nothing is lost."""
    flags: dict[str, Any] = {
        "model.name": model,
        "backend.type": backend,
        "cluster.replicas": replicas,
        "server.host": host,
        "server.port": port,
        "cluster.address": address,
    }
    if model is not None:
        flags["models"] = ()
    config = load_settings(config_file, assignments, flags).config

    from cllm.cluster.ray_node import prepare_environment
    from cllm.observe.log import setup_logging

    prepare_environment()
    setup_logging(config.log)
    if join is not None:
        if address is not None or config.cluster.address is not None:
            raise ConfigError("--join adds this machine to a cluster, so it goes without --address and cluster.address")
        _work_for(join, config, detach=detach)
    else:
        _serve(config, detach=detach)


@app.command()
def status(address: AddressOption = None, json_file: JsonOption = None) -> None:
    """Show machines, replicas and their load."""
    from cllm.cluster.ray_node import connect, prepare_environment

    prepare_environment()
    where = _address(address)
    connect(where)
    from cllm.cluster.overview import overview

    found = overview(where)
    if found is None:
        raise ConfigError(f"the Ray cluster at {where} does not run cLLM: `cllm cluster up` deploys it")
    write_or_show(json_file, _as_json(found), lambda: _print_overview(found))


@app.command()
def down(address: AddressOption = None) -> None:
    """Stop serving once running requests have ended; stop Ray, too, if `cllm cluster up` started it here."""
    from cllm.cluster.ray_node import connect, found_node, prepare_environment, stop

    prepare_environment()
    where, node = _address(address), found_node()
    is_own = node is not None and node.address == where
    if node is None or not is_own or node.is_head:
        connect(where)
        from cllm.cluster.rollout import is_deployed, remove

        if not is_deployed() and not is_own:
            raise ConfigError(f"the Ray cluster at {where} does not run cLLM")
        remove()
        print_status("cLLM is stopped")
    if node is not None and is_own:
        stop(node)
        print_status("Ray is stopped on this machine")


def _address(given: str | None) -> str:
    """The address of the cluster to use: as given, or as this machine remembers it."""
    from cllm.cluster.ray_node import found_node, no_cluster

    address = load_settings(None, None, {"cluster.address": given}).config.cluster.address
    if address is not None:
        return address
    node = found_node()
    if node is None:
        raise no_cluster()
    return node.address


# -- up --------------------------------------------------------------------------------------------------------------


def _work_for(address: str, config: Config, *, detach: bool) -> None:
    """This machine as part of another one's cluster."""
    from cllm.cluster.ray_node import found_node, join, one_at_a_time, stop
    from cllm.config.cluster import is_address

    if not is_address(address):
        raise ConfigError(f"--join is {address!r}: it must be HOST:PORT such as 10.0.0.1:6379")
    with one_at_a_time():
        if (old := found_node()) is not None:
            raise ConfigError(f"this machine is already in the cluster at {old.address}: `cllm cluster down` leaves it")
        node = join(address, config.cluster, outlives=detach)
    print(f"This machine is part of the cluster at {address}", flush=True)
    if detach:
        return
    try:
        _on_signals()
        _watch(node, None)
    except SystemExit:
        log.info("leaving the cluster")
    finally:
        stop(node)


def _serve(config: Config, *, detach: bool) -> None:
    from cllm.cluster.models import cluster_models
    from cllm.cluster.ray_node import connect, found_node, one_at_a_time, start_head, stop
    from cllm.loading.check import check_loadable
    from cllm.server.http.listening import bind

    models = cluster_models(config)  # before anything is started: the settings may make no sense
    started = None
    try:
        with one_at_a_time():
            node = found_node()
            address = config.cluster.address or (node.address if node is not None else None)
            is_here = address is None or (node is not None and node.is_head and node.address == address)
            # What would fail later on each replica. The head needs every model's files; they are downloaded if need be.
            for model in models if is_here else ():
                check_loadable(model.config)
            _on_signals()
            if address is None:
                bind(config.server).close()  # an ingress could not say it as clearly
                log.info("starting Ray on this machine")
                started = start_head(config.cluster, outlives=detach)
                address = started.address
            connect(address, verbose=config.log.level == "debug")
            _on_signals()
            stays = _deploy(config, address, is_here=is_here) and not detach
    except BaseException:
        if started is not None:
            stop(started)
        raise
    if stays:
        _stay(models, config.cluster.drain_s, started)


def _deploy(config: Config, address: str, *, is_here: bool) -> bool:
    """Whether it was not there before. `is_here`: this machine is the head, where the models have been checked."""
    from cllm.cluster.models import cluster_models, with_absolute_paths
    from cllm.cluster.overview import overview
    from cllm.cluster.rollout import check_models, check_room, deploy, has_room, is_deployed

    is_new = not is_deployed()
    config = with_absolute_paths(config)
    models = cluster_models(config)
    check_room(models)
    if not is_here:
        check_models(models)
    _check_port(config, None if is_new else overview(address))
    log.info("deploying to the Ray cluster at %s", address)
    if not has_room(models):
        log.warning(
            "the machines have too few CPUs or GPUs for all replicas: the rest start when machines are added "
            "(cllm cluster up --join %s)",
            address,
        )
    deploy(config, lambda now: log.info("%d of %s ready", now.ready, _counted(now.wanted, "replica")))
    found = overview(address)
    url = found.url if found is not None else None
    served = "" if found is None else _what_is_served(found, models)
    print(f"cLLM is {'ready' if is_new else 'updated'}: {url or 'through Ray Serve'} ({served})", flush=True)
    return is_new


def _check_port(config: Config, running: Overview | None) -> None:
    """Before an update: an ingress that cannot listen would fail after old ones were stopped."""
    from cllm.server.http.listening import bind

    url = None if running is None else running.url
    if url is not None and not url.endswith(f":{config.server.port}"):
        bind(config.server).close()


def _what_is_served(found: Overview, models: list[ClusterModel]) -> str:
    by_name = {row.name: row for row in found.deployments}
    parts = []
    for model in models:
        row = by_name[model.deployment]
        running = sum(each.state == "running" for each in row.replicas)
        count = f"{running} of {row.wanted} replicas" if running != row.wanted else _counted(running, "replica")
        parts.append(f"{row.model or model.name}, {count}")
    return "; ".join(parts)


def _counted(number: int, what: str) -> str:
    return f"1 {what}" if number == 1 else f"{number} {what}s"


def _stay(models: list[ClusterModel], drain_s: float, started: RayNode | None) -> None:
    """Until a signal: then stop serving, and Ray if it was started here. A second signal stops at once."""
    from cllm.cluster.ray_node import stop
    from cllm.cluster.rollout import remove

    try:
        _watch(started, models)
    except SystemExit:
        log.info("shutting down; running requests have %g s to finish", drain_s)
        remove()
    finally:
        if started is not None:
            stop(started)


def _watch(node: RayNode | None, models: list[ClusterModel] | None) -> None:
    """Say when replicas come and go."""
    from cllm.cluster.ray_node import ClusterError

    seen: int | None = None
    while True:
        time.sleep(WATCH_S)
        if node is not None and not node.runs:
            raise ClusterError("Ray has stopped on this machine: see Ray's logs, in /tmp/ray/session_latest/logs")
        if models is not None:
            from cllm.cluster.rollout import progress

            now = progress(models).ready
            if seen is not None and now != seen:
                log.info("%s ready", _counted(now, "replica"))
            seen = now


def _on_signals() -> None:
    """To be called again once Ray is connected: it has handlers of its own, which print a stack."""
    signalled_at = [-ONE_SIGNAL_S]

    def leave(number: int, frame: Any) -> None:
        now = time.monotonic()
        last, signalled_at[0] = signalled_at[0], now
        if now - last >= ONE_SIGNAL_S:
            sys.exit(128 + number)

    ending = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        ending.append(signal.SIGHUP)
    for number in ending:
        signal.signal(number, leave)


# -- status ----------------------------------------------------------------------------------------------------------


def _as_json(found: Overview) -> dict[str, Any]:
    from dataclasses import asdict

    tree = asdict(found)
    for deployment in tree["deployments"]:
        for replica in deployment["replicas"]:
            seen = replica.pop("seen")
            replica.update({} if seen is None else seen._asdict())
    return tree


def _print_overview(found: Overview) -> None:
    from rich.table import Table

    console = open_console()
    console.print(f"{found.url or 'through Ray Serve'}: {found.state}; Ray cluster at {found.address}")
    machines = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("machine", "CPUs", "GPUs", ""):
        machines.add_column(name, justify="right" if name.endswith("s") else "left")
    for node in found.nodes:
        machines.add_row(node.host, f"{node.cpus:g}", f"{node.gpus:g}", "head" if node.is_head else "")
    console.print(machines)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("model", "replica", "state", "machine", "running", "waiting", "KV use", "hit rate"):
        table.add_column(name, justify="right" if name in ("running", "waiting", "KV use", "hit rate") else "left")
    for row in found.deployments:
        for replica in row.replicas:
            table.add_row(row.model or row.name, *_cells(replica))
    console.print(table)
    for row in found.deployments:
        if problem := _problem(row):
            console.print(problem)


def _cells(replica: ReplicaRow) -> list[str]:
    head = [replica.id, replica.state, replica.host or ""]
    seen = replica.seen
    if seen is None:
        return [*head, "", "", "", ""]
    rate = "" if seen.hit_rate is None else f"{seen.hit_rate:.0%}"
    return [*head, str(seen.running), str(seen.waiting), f"{seen.kv_use:.0%}", rate]


def _problem(row: DeploymentRow) -> str | None:
    running = sum(each.state == "running" for each in row.replicas)
    if running == row.wanted:
        return None
    lines = row.message.strip().splitlines()
    return f"{row.model or row.name}: {running} of {row.wanted} running" + (f": {lines[-1]}" if lines else "")
