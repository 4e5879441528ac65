"""A paged cache over the fake backend: real bookkeeping, without a model's memory."""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic

from cllm.backends.fake import FakeBackend
from cllm.engine.budget import StepBudget
from cllm.engine.params import SamplingParams
from cllm.engine.request import Terms, build_request
from cllm.engine.scheduler import Scheduler
from cllm.engine.submission import Submission
from cllm.kv.ops import BlockGeometry
from cllm.kv.paged.local import LocalShape
from cllm.kv.paged.manager import PagedKVManager

BLOCK_SIZE = 16
VOCABULARY = 320
STEP_TOKENS = 512


def paged_cache(backend: FakeBackend, blocks: int, *, allocated: bool = True) -> PagedKVManager:
    """`allocated`: the backend can compute, not only administer."""
    layout = backend.spec.kv_layout("f16", "f16", BLOCK_SIZE, apart=True)
    window, cells, ahead = (layout.local.window, layout.local.cells, STEP_TOKENS) if layout.local else (0, 0, 0)
    state = layout.states.cells if layout.states else 0
    geometry = BlockGeometry(blocks, BLOCK_SIZE, layout if cells or state else None)
    backend.allocate(geometry if allocated else BlockGeometry(1, BLOCK_SIZE))
    local = LocalShape(window, cells, ahead, state) if cells or state else None
    return PagedKVManager(backend.ops, geometry, local, bytes_per_token=4, eviction_policy="worth")  # type: ignore[arg-type]


def open_scheduler(kv: PagedKVManager, *, running: int, step_tokens: int) -> Scheduler:
    """Its steps have so many tokens, however long they take."""
    budget = StepBudget(inter_token_s=1.0, max_gap_s=1.0, prompt_only_s=1.0, max_tokens=step_tokens)
    return Scheduler(kv, budget, max_running=running)


def add_request(scheduler: Scheduler, name: str, prompt: Sequence[int]) -> None:
    """An answer that never ends by itself."""
    params = SamplingParams(max_tokens=None, temperature=0.0, ignore_eos=True)
    terms = Terms(1 << 16, VOCABULARY)
    scheduler.requests.add(build_request(Submission(list(prompt), params, name), terms, arrival=monotonic()))
