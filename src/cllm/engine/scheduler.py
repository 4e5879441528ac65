"""The scheduler: what a step computes, and what its result means. Each part owns its state and is handed the others.

requests   every request, its sequences, and its outputs     Requests
planner    what the next step computes                       Planner
results    what a step's result means                        Results
faults     what to do when something broke                   Faults
doubt      whether memory has to be rebuilt                  MemoryDoubt
"""

from __future__ import annotations

import time
from collections.abc import Callable

from cllm.backends.base import StepResult
from cllm.engine.budget import StepBudget
from cllm.engine.faults import Faults
from cllm.engine.plan import Drafting, StepPlan
from cllm.engine.planner import Planner
from cllm.engine.requests import MemoryDoubt, Requests
from cllm.engine.results import Results
from cllm.kv.manager import KVManager


class Scheduler:
    def __init__(
        self,
        kv: KVManager,
        budget: StepBudget,
        *,
        max_running: int,
        ageing_s: float = 10.0,
        drafting: Drafting | None = None,
        whole_prompts: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.kv = kv
        self.doubt = doubt = MemoryDoubt()
        self.requests = Requests(kv, doubt, ageing_s=ageing_s, drafting=drafting, clock=clock)
        self.faults = Faults(kv, self.requests, doubt)
        self.planner = Planner(
            kv,
            self.requests,
            self.faults,
            doubt,
            budget,
            max_running=max_running,
            drafting=drafting,
            whole_prompts=whole_prompts,
        )
        self.results = Results(kv, self.requests, self.faults, doubt, max_running=max_running)

    @property
    def budget(self) -> StepBudget:
        return self.planner.budget

    @property
    def drafting(self) -> Drafting | None:
        return self.planner.drafting

    def schedule(self) -> StepPlan:
        return self.planner.schedule()

    def apply(self, plan: StepPlan, result: StepResult) -> None:
        self.results.apply(plan, result)
