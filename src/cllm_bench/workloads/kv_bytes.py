"""What the cache takes of memory for one long text, in models with layers that do not keep all of it."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any, NamedTuple

from cllm.backends.fake import FakeBackend
from cllm.config import Config
from cllm.engine.stepper import Stepper
from cllm.kv.groups import GroupKind, KVLayout
from cllm.kv.paged.local import SnapshotLimits
from cllm.models.gguf import GGUFModel
from cllm.models.gguf_decoder import decoder_spec
from cllm.models.spec import ModelSpec
from cllm_bench.administered import STEP_TOKENS, VOCABULARY, add_request, open_scheduler, paged_cache
from cllm_bench.errors import BenchError
from cllm_bench.figures import OURS, Figure, Metrics, Run, own
from cllm_bench.workloads.base import LocalWorkload, Setup, busy_at_rest
from cllm_bench.workloads.over_http import warm_cllm

MOST_OF_FULL = 0.25

Taken = dict[GroupKind, int]
"""Bytes by kind of layers."""


@dataclass(frozen=True)
class KvBytes(LocalWorkload):
    """The scheduler and the cache do what they do for a prompt and its answer, with the model's own layout, and only
    nothing is computed. A server that computes a shorter text says, in the middle of its answer, what it takes: that is
    compared with what was reckoned for it."""

    tokens: int = 32_000
    checked_tokens: int = 4_000
    answer_tokens: int = 64

    name = "kv-bytes"
    figures = (
        Figure("mb", "K/V and states of the whole text", "MB", format=",.1f"),
        Figure("all_full_mb", "the same with all layers full", "MB", format=",.1f"),
        Figure("of_all_full", "of that", "x", limit=own(MOST_OF_FULL), compared=False),
        Figure("window_mb", "of it layers with a window", "MB", format=",.1f"),
        Figure("window_growth", "the same over at a quarter of the text", "x", limit=own(1.0), compared=False),
        Figure("state_mb", "of it states", "MB", format=",.1f"),
        Figure("prompt_mb", "most while the prompt is computed", "MB", format=",.1f"),
        Figure("server_mb", "a server, in its answer to the shorter text", "MB", format=",.1f"),
        Figure("server_over_reckoned", "the same over what was reckoned", "x", limit=own(1.02), compared=False),
    )

    @property
    def title(self) -> str:
        return f"kv-bytes: one text of {self.tokens:,} tokens; on a server, {self.checked_tokens:,}"

    def quick(self) -> KvBytes:
        return replace(self, tokens=8000, checked_tokens=400, answer_tokens=4000)

    async def one_repeat(self, setup: Setup, repeat: int) -> list[Run]:
        spec = decoder_spec(GGUFModel.open(setup.model_file))
        layout = layout_of(spec)
        facts: dict[str, Any] = {"busy_percent_before": await busy_at_rest()}
        metrics, facts["bytes_in_prompt"] = self.reckoned(spec, layout)
        taken, computed = await self._on_a_server(setup)
        facts["server"] = {"computed": computed, **taken}
        metrics["server_mb"] = sum(taken.values()) / 1e6
        metrics["server_over_reckoned"] = sum(taken.values()) / sum(reckon(layout, computed).taken.values())
        return [Run(OURS, repeat, metrics, facts)]

    def reckoned(self, spec: ModelSpec, layout: KVLayout) -> tuple[Metrics, dict[int, int]]:
        """With what the prompt takes, by the tokens that are computed."""
        quarter, whole = (reckon(layout, tokens) for tokens in (self.tokens // 4, self.tokens))
        full = spec.kv_bytes_per_token("f16", "f16") * self.tokens
        taken = sum(whole.taken.values())
        metrics: Metrics = {
            "mb": taken / 1e6,
            "all_full_mb": full / 1e6,
            "of_all_full": taken / full,
            "prompt_mb": max(whole.in_prompt.values()) / 1e6,
        }
        metrics |= {f"{kind}_mb": size / 1e6 for kind, size in whole.taken.items() if kind != "full"}
        if "window" in whole.taken:
            metrics["window_growth"] = whole.taken["window"] / quarter.taken["window"]
        return metrics, whole.in_prompt

    async def _on_a_server(self, setup: Setup) -> tuple[Taken, int]:
        """What it says in its answer, and how many tokens it has computed."""
        begun = asyncio.Event()
        async with warm_cllm(setup, {"kv.disk.enabled": False, **setup.settings}) as (_, client):
            text = setup.prompts(self.name).text(self.checked_tokens)
            answering = client.complete(text, self.answer_tokens, lambda pieces: begun.set())
            answer = asyncio.ensure_future(answering)
            answer.add_done_callback(lambda _: begun.set())
            await begun.wait()
            found = None
            while not answer.done():
                found = of_report(json.loads(await client.text("/kv") or "{}")) or found
            await answer
            client.raise_for_errors()
        if found is None:
            raise BenchError("the answer was over before the server had said what it takes; raise --size answer_tokens")
        return found


def layout_of(spec: ModelSpec) -> KVLayout:
    settings = Config().resources
    return spec.kv_layout(settings.kv_type_k, settings.kv_type_v, settings.block_size, apart=True)


def of_report(report: Mapping[str, Any]) -> tuple[Taken, int] | None:
    """What a server's `GET /kv` says of its one running sequence, and how much of it is computed; None: none runs."""
    computed = [sequence["computed"] for sequence in report.get("details", {}).get("running", ())]
    if len(computed) != 1 or not computed[0]:
        return None
    return {each["kind"]: each["used"] * each["block_bytes"] for each in report["groups"]}, computed[0]


class Reckoned(NamedTuple):
    taken: Taken
    """In the answer."""
    in_prompt: dict[int, int]
    """While the prompt is computed, by how much of it is."""


def reckon(layout: KVLayout, length: int) -> Reckoned:
    """What one sequence holds when so many tokens are computed, the last two of them in its answer."""
    local, states = layout.local, layout.states
    backend = FakeBackend(
        vocab_size=VOCABULARY,
        context_length=length + STEP_TOKENS,
        window=local.window if local else 0,
        local_layers=local.cells if local else 0,
        states=states.cells if states else 0,
    )
    with backend:
        kv = paged_cache(backend, _enough(layout, length))
        scheduler = open_scheduler(kv, running=1, step_tokens=STEP_TOKENS)
        stepper = Stepper(backend, scheduler, timer=perf_counter)
        draw = random.Random(length)
        add_request(scheduler, "one", [draw.randrange(256) for _ in range(length - 1)])
        in_prompt: dict[int, int] = {}
        while True:
            stepper.advance()
            scheduler.requests.take_outputs()
            (computed,) = (sequence.num_computed for sequence in kv.arena.running.values())
            taken = {
                group.kind: group.used * group.block_bytes // kv.arena.block_bytes * layout.cell_bytes
                for group in kv.usage().groups
            }
            if computed >= length:
                return Reckoned(taken, in_prompt)
            in_prompt[computed] = sum(taken.values())


def _enough(layout: KVLayout, length: int) -> int:
    """Cells for the sequence and its snapshots."""
    local, states = layout.local, layout.states
    snapshots = SnapshotLimits().most
    most = -(-length // layout.block_size) + 64 + snapshots * (states.cells if states else 0)
    if local is not None:
        most += snapshots * local.cells * -(-(local.window + STEP_TOKENS) // layout.block_size)
    return most
