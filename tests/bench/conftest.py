"""Nothing is measured here, so no run waits until the machine has come to rest."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cllm_bench.workloads import base, drafts, structured


@pytest.fixture(autouse=True)
def _at_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for module in (base, drafts, structured):
            patch.setattr(module, "SETTLE_S", 0.03)
        yield
