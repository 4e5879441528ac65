"""A replica takes its share of a machine, not all of it."""

from __future__ import annotations

from typing import Any

import pytest

from cllm.cluster.share import own_share
from cllm.config import Config
from cllm.machine import Cpus

MACHINE = Cpus(machine=16, allowed=16, cores=16)


def share(settings: dict[str, Any], *, cpus: Cpus = MACHINE, node_cpus: float = 16.0, replicas: int = 1) -> Config:
    return own_share(Config.model_validate(settings), cpus, node_cpus, replicas)


@pytest.mark.parametrize(
    ("reserved", "threads"), [(1.0, 1), (0.5, 1), (2.0, 2), (4.0, 4), (8.0, 7), (16.0, 14), (64.0, 14), (0.0, None)]
)
def test_threads_follow_the_reserved_cpus(reserved: float, threads: int | None) -> None:
    assert share({"cluster": {"cpus": reserved}}).backend.threads == threads


def test_a_containers_limit_holds_and_so_does_what_was_set() -> None:
    within = Cpus(machine=16, allowed=16, cores=16, quota=2.0)
    assert share({"cluster": {"cpus": 8.0}}, cpus=within).backend.threads == 2
    assert share({"cluster": {"cpus": 8.0}, "backend": {"threads": 3}}).backend.threads == 3


@pytest.mark.parametrize(
    ("reserved", "node_cpus", "replicas", "sharing"),
    [
        (4.0, 16.0, 1, 1),
        (4.0, 16.0, 2, 2),
        (4.0, 16.0, 100, 4),
        (16.0, 16.0, 100, 1),
        (0.1, 1.0, 100, 10),
        (0.0, 16.0, 3, 3),
        (32.0, 16.0, 3, 1),
    ],
)
def test_replicas_of_a_machine_share_its_memory(reserved: float, node_cpus: float, replicas: int, sharing: int) -> None:
    found = share({"cluster": {"cpus": reserved}}, node_cpus=node_cpus, replicas=replicas)
    assert found.resources.kv_memory_fraction == pytest.approx(0.25 / sharing)


def test_reserved_memory_is_a_limit() -> None:
    resources = share({"cluster": {"memory_mb": 4096.0}}, replicas=16).resources
    assert (resources.max_memory_mb, resources.kv_memory_fraction) == (4096.0, 0.25)
    asked = {"cluster": {"memory_mb": 4096.0}, "resources": {"max_memory_mb": 2048.0}}
    assert share(asked).resources.max_memory_mb == 2048.0


def test_a_limit_in_bytes_is_one_replicas() -> None:
    resources = share({"resources": {"kv_cache_max_memory_mb": 100.0}}, replicas=16).resources
    assert resources.kv_cache_max_memory_mb == 100.0
    assert resources.kv_memory_fraction == 0.25


@pytest.mark.parametrize(("gpus", "fraction"), [(1.0, None), (2.0, None), (0.5, 0.45), (0.25, 0.225)])
def test_replicas_of_a_gpu_share_its_memory(gpus: float, fraction: float | None) -> None:
    resources = share({"cluster": {"gpus": gpus}}, replicas=16).resources
    if fraction is None:
        assert "kv_memory_fraction" not in resources.model_fields_set, "the default of a whole GPU"
    else:
        assert resources.kv_memory_fraction == pytest.approx(fraction)
