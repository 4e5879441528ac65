"""The backend over llama.cpp: one model, one context, one stream of K/V memory per slot.

Why streams of their own (`kv_unified` off): in a unified cache every query walks all cells up to the highest used one,
so that idle sequences slow the running ones.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np

from cllm.backends.base import (
    Backend,
    BackendTraits,
    Chunk,
    Hidden,
    Logits,
    Pooling,
    PoolingKind,
    PromptScores,
    Scoring,
    StepResult,
    asks_more,
)
from cllm.backends.llama_cpp.batch import count_passes, cut
from cllm.backends.llama_cpp.context import Context, States
from cllm.backends.llama_cpp.library import load_library
from cllm.backends.llama_cpp.model import carries_state, load_model, read_spec, with_state_bytes
from cllm.backends.llama_cpp.slots import LlamaSlotOps
from cllm.backends.scoring import join_scores, pool_rows, score_rows
from cllm.errors import BackendError, ConfigError, ModelError
from cllm.kv.ops import Geometry, SlotGeometry
from cllm.kv.sizing import CPU_KV_TYPES, most_bytes

log = logging.getLogger("cllm.llama_cpp")

MOST_ROUNDING = 0.25
"""By how much rounding may change logits, as a part of their spread; a mistake changes them by more than all of it."""
_TRIED = array("i", [0, 1, 2, 3])
"""Tokens that every vocabulary has."""


class LlamaCppBackend(Backend):
    traits = BackendTraits(
        "llama_cpp", layout="slots", most_drafts=32, chunk_gap_ms=250.0, default_gap_ms=1000.0, frees_windows=False
    )

    def __init__(
        self,
        path: Path,
        *,
        threads: int,
        n_batch: int,
        n_ubatch: int,
        kv_type_k: str,
        kv_type_v: str,
        flash_attention: bool,
        mmap: bool,
        mlock: bool,
        drafts: bool = True,
        whole_windows: bool = False,
        pooling: PoolingKind = "last",
    ) -> None:
        """Without `drafts` no memory is reserved for their rows of logits. `whole_windows`: layers with a sliding
        window keep all positions, as rolling windows need it."""
        self._whole_windows = whole_windows
        self._apart = False
        """Whether several sequences must not be in one batch."""
        self.batch_splits = 0
        """Passes over the weights beyond the first one of each step."""
        self._model: Any = None
        self._context: Context | None = None
        self.traits = replace(
            self.traits,
            pooling=pooling,
            most_drafts=self.traits.most_drafts if drafts else 0,
            preferred_step_tokens=min(self.traits.preferred_step_tokens, n_batch),
        )
        _check_types(kv_type_k, kv_type_v, flash_attention)
        self._threads = threads
        self._n_batch, self._n_ubatch = n_batch, n_ubatch
        self._kv_type_k, self._kv_type_v = kv_type_k, kv_type_v
        self._flash_attention = flash_attention
        self._library = load_library()
        self._library.take_log()
        self._model = load_model(self._library, path, mmap, mlock)
        try:
            self.spec = read_spec(self._library.api, self._model, path)
            if carries_state(self._library.api, self._model):
                self._try_states()
        except (BackendError, ModelError):
            self.close()
            raise

    def _try_states(self) -> None:
        """Whether a state can be put back exactly depends on the model and on the version of llama.cpp; how large it is
        for certain, only llama.cpp knows."""
        self.traits = replace(self.traits, most_drafts=0)
        context = self._make_context(SlotGeometry(2, 256), n_batch=2 * len(_TRIED))
        ops, token = LlamaSlotOps(context), array("i", [0])
        try:
            self._apart = self._mixes_up(context, ops)
            context.decode([Chunk(token, 0, False, 0)])
            snapshot = ops.snapshot(0)
            expected = context.decode([Chunk(token, 1, True, 0)]).copy()
            ops.restore(0, snapshot, 1)
            exact = np.array_equal(context.decode([Chunk(token, 1, True, 0)]), expected, equal_nan=True)
            reason = "it goes on with other values than before"
        except BackendError as error:
            exact, reason = False, str(error)
        finally:
            context.close()
        if not exact:
            raise ModelError(
                f"llama.cpp cannot put the state of {self.spec.architecture} models back ({reason}), so every prompt "
                "would be computed from its beginning; use another model"
            )
        if self._apart:
            log.warning(
                "this version of llama.cpp computes sequences of %s models wrongly if several are in one batch: they "
                "are computed one after another",
                self.spec.architecture,
            )
        size = snapshot.nbytes
        if context.window:  # a snapshot has what is in it, too
            size = most_bytes(context.window, self.spec.kv_bytes_per_token(self._kv_type_k, self._kv_type_v), size)
        self.spec = with_state_bytes(self.spec, size)

    @staticmethod
    def _mixes_up(context: Context, ops: LlamaSlotOps) -> bool:
        """Whether a prompt has other logits beside another one, by more than rounding does. Leaves the slots empty."""
        first, second = Chunk(_TRIED, 0, True, 0), Chunk(_TRIED[::-1], 0, True, 1)
        alone = context.decode([first]).copy()
        ops.remove(0, 0)
        difference = np.abs(context.decode([first, second])[:1] - alone).max()
        for slot in range(2):
            ops.remove(slot, 0)
        return bool(difference > MOST_ROUNDING * alone.std())

    def allocate(self, geometry: Geometry) -> None:
        if not isinstance(geometry, SlotGeometry):
            raise BackendError("llama.cpp keeps its K/V in slots, not in blocks")
        self._check_slots(geometry.slots)
        self._context = self._make_context(geometry)
        self._ops = LlamaSlotOps(
            self._context,
            type_k=self._kv_type_k,
            portable=geometry.at_start is not None,
            slot_bytes=self._slot_bytes(self._context),
        )
        self.traits = replace(self.traits, no_window=self._ops.no_shift)

    @cached_property
    def resizes_slots(self) -> bool:
        """Tried with one token and a small context: it depends on the model and on the version of llama.cpp."""
        context = self._make_context(SlotGeometry(2, 256, at_start=1), n_batch=1)
        ops = LlamaSlotOps(context, portable=True)
        try:
            context.decode([Chunk(array("i", [0]), 0, False, 0)])
            saved = ops.save(0)
            ops.resize(2)
            ops.load(1, saved)
            return ops.length(1) == 1
        except BackendError as error:
            log.debug("the number of slots cannot change: %s", error)
            return False
        finally:
            context.close()

    @property
    def kv_bytes(self) -> int:
        context = self._live()
        return context.slots * self._slot_bytes(context)

    def _slot_bytes(self, context: Context) -> int:
        token_bytes = self.spec.kv_bytes_per_token(self._kv_type_k, self._kv_type_v)
        return context.slot_tokens * token_bytes + self.spec.state_bytes

    @property
    def ops(self) -> LlamaSlotOps:
        self._live()
        return self._ops

    def collect(self, chunks: Sequence[Chunk]) -> StepResult:
        return self._read_prompts(chunks) if asks_more(chunks) else StepResult(self._step(chunks))

    def _step(self, chunks: Sequence[Chunk]) -> Logits:
        """Slots are computed in ascending order, which llama.cpp joins into the fewest passes. When the caller's order
        is the same and all fits into one batch, the rows are llama.cpp's own memory, else a copy."""
        context = self._live()
        if not chunks:
            return np.empty((0, self.spec.n_vocab), np.float32)
        context.clear_abort()
        self._ops.settle()
        ordered = sorted(chunks, key=attrgetter("slot"))
        self._check_chunks(ordered, context)
        wanting = [chunk.slot for chunk in chunks for _ in range(chunk.wanted_logits)]
        batches = [batch for part in self._together(ordered) for batch in cut(part, context.n_batch)]
        self.batch_splits += sum(count_passes(batch, context.n_ubatch) for batch in batches) - 1
        if len(batches) == 1 and wanting == sorted(wanting):
            return context.decode(batches[0])

        rows, done = np.empty((len(wanting), self.spec.n_vocab), np.float32), 0
        place = np.argsort(wanting, kind="stable")
        for batch in batches:
            logits = context.decode(batch)
            rows[place[done : done + len(logits)]] = logits
            done += len(logits)
        return rows

    def _together(self, ordered: list[Chunk]) -> list[list[Chunk]]:
        """Chunks that may be in one batch, order kept."""
        return [[chunk] for chunk in ordered] if self._apart else [ordered]

    def _read_prompts(self, chunks: Sequence[Chunk]) -> StepResult:
        """Chunks that ask for more are computed in parts of as many tokens as there may be rows: those to be scored one
        by one, those to be embedded together."""
        context = self._live()
        plain = [chunk for chunk in chunks if chunk.asks is None]
        rows = np.empty((sum(chunk.wanted_logits for chunk in chunks), self.spec.n_vocab), np.float32)
        plain_rows, done, row = self._step(plain).copy(), 0, 0
        context.clear_abort()
        self._ops.settle()
        pooled = self._pool(context, [chunk for chunk in chunks if isinstance(chunk.asks, Pooling)])
        read: dict[int, PromptScores | Hidden] = {}
        for index, chunk in enumerate(chunks):
            if chunk.asks is None:
                rows[row : row + chunk.wanted_logits] = plain_rows[done : done + chunk.wanted_logits]
                done += chunk.wanted_logits
            elif isinstance(chunk.asks, Scoring):
                read[index], last = self._score(context, chunk, chunk.asks)
                rows[row : row + chunk.wanted_logits] = last
            else:
                read[index] = pool_rows(pooled[chunk.slot], chunk, chunk.asks)
            row += chunk.wanted_logits
        return StepResult(rows, None, read)

    def _score(self, context: Context, chunk: Chunk, asked: Scoring) -> tuple[PromptScores, Logits]:
        scores: list[PromptScores] = []
        last = np.empty((0, self.spec.n_vocab), np.float32)
        for done, part in self._parts(context, chunk):
            logits = context.decode([part])
            targets = asked.targets[done : done + len(part.tokens)]
            if targets:
                scores.append(score_rows(logits[: len(targets)], targets, asked.top))
            last = logits[len(part.tokens) - 1 :].copy()
        return join_scores(scores), last[-1:]

    def _pool(self, context: Context, chunks: Sequence[Chunk]) -> dict[int, States]:
        """The hidden states of all tokens, by slot."""
        if not chunks:
            return {}
        ordered = sorted(chunks, key=attrgetter("slot"))
        self._check_chunks([replace(chunk, wanted_logits=0) for chunk in ordered], context)
        wanted = [Chunk(chunk.tokens, chunk.start, len(chunk.tokens), chunk.slot) for chunk in ordered]
        states: dict[int, list[States]] = {chunk.slot: [] for chunk in ordered}
        with context.embedding():
            most = min(context.most_rows, context.n_batch)
            for batch in (batch for part in self._together(wanted) for batch in cut(part, most)):
                context.decode(batch)
                found = context.states(sum(len(part.tokens) for part in batch), self.spec.n_embd)
                done = 0
                for part in batch:
                    states[part.slot].append(found[done : done + len(part.tokens)])
                    done += len(part.tokens)
        return {slot: np.concatenate(parts) for slot, parts in states.items()}

    def _parts(self, context: Context, chunk: Chunk) -> Iterator[tuple[int, Chunk]]:
        """A chunk in parts all of whose rows are wanted, each with the number of tokens before it."""
        self._check_chunks([replace(chunk, wanted_logits=0)], context)
        most = min(context.most_rows, context.n_batch)
        for done in range(0, len(chunk.tokens), most):
            tokens = chunk.tokens[done : done + most]
            yield done, Chunk(tokens, chunk.start + done, len(tokens), chunk.slot)

    def abort(self) -> None:
        context = self._context  # read once: another thread may be closing
        if context is not None:
            context.abort()

    def rebuild(self) -> None:
        context = self._live()
        context.close()
        context.open()
        self._ops.forget()

    def close(self) -> None:
        context, self._context = self._context, None
        if context is not None:
            context.close()
        model, self._model = self._model, None
        if model is not None:
            self._library.free_model(model)

    @property
    def kv_identity(self) -> dict[str, str | int]:
        library = self._library
        return {
            "llama_cpp": library.version,
            "instructions": library.cpu_feature(),
            "flash_attention": int(self._flash_attention),
            "form": self.ops.form,
            "context": self._live().slot_tokens,  # some models turn positions another way in a long one
        }

    def describe(self) -> str:
        library = self._library
        threads = "1 thread" if self._threads == 1 else f"{self._threads} threads"
        attention = "flash attention" if self._flash_attention else "no flash attention"
        return (
            f"llama.cpp ({library.package} {library.version}, {library.cpu_feature()}, {threads}, "
            f"K {self._kv_type_k}, V {self._kv_type_v}, {attention})"
        )

    def _live(self) -> Context:
        if self._context is None:
            raise BackendError("llama.cpp has no context: allocate() was not called, or close() was", fatal=True)
        return self._context

    def _check_slots(self, slots: int) -> None:
        limit = self._library.max_sequences
        if slots > limit:
            raise ConfigError(f"backend.llama_cpp.n_seq_max is {slots}, but llama.cpp runs at most {limit} sequences")
        if slots > self._n_batch:
            raise ConfigError(
                f"backend.llama_cpp.n_batch is {self._n_batch}: it must be at least n_seq_max, which is {slots}"
            )

    def _check_chunks(self, ordered: Sequence[Chunk], context: Context) -> None:
        """What llama.cpp would take silently, or end the process for."""
        if (rows := sum(chunk.wanted_logits for chunk in ordered)) > context.most_rows:
            raise BackendError(f"{rows} rows of logits were asked for, but there is room for {context.most_rows}")
        last = -1
        for chunk in ordered:
            held, end = self._ops.length(chunk.slot), chunk.start + len(chunk.tokens)
            if chunk.slot == last:
                raise BackendError(f"slot {chunk.slot} has two chunks in one step")
            if not chunk.tokens:
                raise BackendError(f"the chunk of slot {chunk.slot} has no tokens")
            if chunk.start != held:
                raise BackendError(f"slot {chunk.slot} holds {held} positions, but its chunk starts at {chunk.start}")
            if end > context.slot_tokens:
                raise BackendError(f"slot {chunk.slot} has room for {context.slot_tokens} positions, not {end}")
            last = chunk.slot

    def _make_context(self, geometry: SlotGeometry, n_batch: int | None = None) -> Context:
        params = self._context_params()
        if n_batch is not None:
            params.n_batch = params.n_ubatch = n_batch
        return Context(self._library, self._model, params, geometry, self.spec.n_vocab, self.traits.most_drafts)

    def _context_params(self) -> Any:
        """All but the number of slots, which may change."""
        api = self._library.api
        params = api.llama_context_default_params()
        params.kv_unified = False
        params.swa_full = self._whole_windows
        params.n_batch, params.n_ubatch = self._n_batch, self._n_ubatch
        params.n_threads = params.n_threads_batch = self._threads
        params.type_k = getattr(api, f"GGML_TYPE_{self._kv_type_k.upper()}")
        params.type_v = getattr(api, f"GGML_TYPE_{self._kv_type_v.upper()}")
        params.flash_attn_type = (
            api.LLAMA_FLASH_ATTN_TYPE_ENABLED if self._flash_attention else api.LLAMA_FLASH_ATTN_TYPE_DISABLED
        )
        params.pooling_type = api.LLAMA_POOLING_TYPE_NONE  # a text is computed in parts, which we pool ourselves
        params.offload_kqv = params.op_offload = False
        params.no_perf = True
        return params


def _check_types(kv_type_k: str, kv_type_v: str, flash_attention: bool) -> None:
    for key, value in (("kv_type_k", kv_type_k), ("kv_type_v", kv_type_v)):
        if value not in CPU_KV_TYPES:
            raise ConfigError(f"resources.{key} is {value!r}: use one of {', '.join(CPU_KV_TYPES)}")
    if kv_type_v != "f16" and not flash_attention:
        raise ConfigError(
            f"resources.kv_type_v {kv_type_v} needs flash attention: set backend.llama_cpp.flash_attention to true, "
            "or resources.kv_type_v to f16"
        )
