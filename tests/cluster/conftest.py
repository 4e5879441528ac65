"""A Ray cluster for all tests. Without Ray these tests are not even looked at: `make test-cluster` installs it."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from ray_kit import RayCluster

collect_ignore_glob = [] if find_spec("ray") else ["test_*.py"]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("filterwarnings", "ignore::DeprecationWarning:ray")
    config.addinivalue_line("filterwarnings", "ignore:Using extra keyword arguments on `Field`")


@pytest.fixture(scope="session")
def cluster() -> Iterator[RayCluster]:
    from ray_kit import running_cluster

    with running_cluster() as cluster:
        yield cluster
