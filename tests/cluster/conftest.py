"""A Ray cluster for all tests that need one. They are collected only with Ray, which `make test-cluster` installs, and
not beside other tests: several of these clusters would be too much for one machine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from ray_kit import RayCluster

_ON_RAY = (
    "test_cluster_answers.py",
    "test_cluster_cli.py",
    "test_cluster_clients.py",
    "test_cluster_events.py",
    "test_cluster_lost_ingress.py",
    "test_cluster_lost_replicas.py",
    "test_cluster_shared_kv.py",
    "test_cluster_updates.py",
    "test_dispatcher.py",
)
collect_ignore = [] if find_spec("ray") and "PYTEST_XDIST_WORKER" not in os.environ else list(_ON_RAY)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("filterwarnings", "ignore::DeprecationWarning:ray")
    config.addinivalue_line("filterwarnings", "ignore:Using extra keyword arguments on `Field`")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """On a busy machine everything that starts processes takes minutes."""
    for item in items:
        if item.path.name in _ON_RAY and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(600))


@pytest.fixture(scope="session")
def cluster() -> Iterator[RayCluster]:
    from ray_kit import running_cluster

    with running_cluster() as cluster:
        yield cluster
