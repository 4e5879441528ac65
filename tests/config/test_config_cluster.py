"""The section `cluster`: what contradicts itself is one line that names the keys and the fix."""

from __future__ import annotations

from typing import Any

import pytest

from cllm.config import InvalidConfigError, config_of, load_config
from cllm.config.cluster import ClusterConfig


def problems(**flags: Any) -> tuple[str, ...]:
    with pytest.raises(InvalidConfigError) as caught:
        load_config(None, {key.replace("__", "."): value for key, value in flags.items()}, {})
    return caught.value.problems


def cluster(**settings: Any) -> ClusterConfig:
    return load_config(None, {"cluster": settings}, {}).config.cluster


def test_the_number_of_replicas() -> None:
    assert (cluster().first_replicas, cluster().most_replicas) == (1, 1)
    assert (cluster(replicas=4).first_replicas, cluster(replicas=4).most_replicas) == (4, 4)
    scaled = cluster(autoscaling={"min_replicas": 2, "max_replicas": 8})
    assert (scaled.first_replicas, scaled.most_replicas) == (2, 8)
    scaled = cluster(replicas=5, autoscaling={"min_replicas": 2, "max_replicas": 8})
    assert (scaled.first_replicas, scaled.most_replicas) == (5, 8)


@pytest.mark.parametrize("address", ["auto", "head:6379", "10.0.0.1:6379", "[fd00::1]:6379"])
def test_addresses(address: str) -> None:
    assert cluster(address=address).address == address


@pytest.mark.parametrize("address", ["", "head", "ray://head:10001", "head:port", "a b:1", "head:123456"])
def test_what_is_no_address(address: str) -> None:
    assert problems(cluster__address=address) == (
        f"cluster.address is {address!r} (flag): it must be auto, or HOST:PORT such as 10.0.0.1:6379 or null "
        "(default null)",
    )


@pytest.mark.parametrize("port", [10_001, 10_002, 12_345, 19_999])
def test_the_port_of_ray_is_none_of_its_workers(port: int) -> None:
    (problem,) = problems(cluster__ray_port=port)
    assert problem.startswith(f"cluster.ray_port is {port} (flag): it must be outside of 10001 to 19999, which are for")


def test_other_ports_of_ray() -> None:
    assert [cluster(ray_port=port).ray_port for port in (0, 10_000, 20_000)] == [0, 10_000, 20_000]


def test_contradictions() -> None:
    assert problems(cluster__autoscaling__min_replicas=3, cluster__autoscaling__max_replicas=2) == (
        "cluster.autoscaling.max_replicas is 2 (flag) but cluster.autoscaling.min_replicas is 3 (flag): raise the "
        "first or lower the second",
    )
    assert problems(cluster__replicas=9, cluster__autoscaling__max_replicas=4) == (
        "cluster.replicas is 9 (flag), which is not between cluster.autoscaling.min_replicas is 1 (default) and "
        "cluster.autoscaling.max_replicas is 4 (flag): change or remove the first",
    )
    assert problems(cluster__gpus=1.5) == ("cluster.gpus is 1.5 (flag): more than one GPU must be a whole number",)
    assert problems(cluster__gpus=1.0, backend__type="native") == (
        "cluster.gpus is 1 (flag) but backend.type is native (flag): only torch uses GPUs; set the first to 0 or "
        "change the second",
    )
    assert problems(cluster__memory_mb=1000.0, resources__kv_cache_max_memory_mb=2000.0) == (
        "resources.kv_cache_max_memory_mb is 2000 (flag) but cluster.memory_mb is 1000 (flag): a replica would need "
        "more memory than it reserves; lower the first or raise the second",
    )


def test_models_may_have_replicas_of_their_own() -> None:
    flags = {"models": [{"name": "a", "cluster": {"replicas": 3}}, "b"], "cluster.cpus": 2.0, "backend.type": "fake"}
    config = load_config(None, flags, {}).config
    first, second = (config_of(config, entry).cluster for entry in config.models)
    assert (first.first_replicas, second.first_replicas) == (3, 1)
    assert first.cpus == second.cpus == 2.0
    assert problems(models=[{"name": "a", "cluster": {"ingresses": 3}}]) == (
        "models[0]: cluster.ingresses is 3 (a): it applies to all models, so set it outside of models",
    )
