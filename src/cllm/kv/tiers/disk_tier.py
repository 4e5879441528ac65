"""The disk as one manager sees it: which part of the store is its model's, and whether loading pays."""

from __future__ import annotations

from collections.abc import Callable

from cllm.kv.disk.store import DiskStore, ModelStore
from cllm.kv.tiers.tier import LEAST_TOKENS, Tier
from cllm.kv.usage import DiskNumbers

LATENCY_S = 0.005
"""Added to every load: another turn of the engine, opening files."""

WORTH_TOKENS = 512
"""A prefix at least this long is written even if nobody has reused it."""


class DiskTier(Tier):
    """One model's blocks on disk. Finds and keeps nothing before `attach`, which another thread may call."""

    place = "the disk"

    def __init__(
        self,
        store: DiskStore,
        *,
        block_tokens: int,
        block_bytes: int,
        least_tokens: int = LEAST_TOKENS,
        worth_tokens: int = WORTH_TOKENS,
    ) -> None:
        super().__init__(block_tokens, block_bytes, least_tokens)
        self.store = store
        self.worth_blocks = -(-worth_tokens // block_tokens)
        self.on_arrival: Callable[[], None] | None = None
        """Called from other threads when a load has ended, or loads have become possible."""
        self._model_store: ModelStore | None = None

    def attach(self, model_store: ModelStore) -> None:
        """The model's fingerprint is known: its blocks can be found."""
        if model_store.block_bytes != self.block_bytes:
            raise ValueError(f"blocks have {self.block_bytes} bytes here and {model_store.block_bytes} on disk")
        self._model_store = model_store
        self.notify()

    @property
    def model_store(self) -> ModelStore | None:
        """None: the disk cannot be used, yet or any more."""
        model_store = self._model_store
        return model_store if self.working and model_store is not None and model_store.ready() else None

    def wait_limit(self, blocks: int, nbytes: int) -> float | None:
        """How long to wait for `nbytes` instead of computing `blocks` blocks. None: compute them."""
        return self._wait_limit(blocks, self.store.load_seconds(nbytes) + LATENCY_S)

    @property
    def measured(self) -> bool:
        return self.store.read_speed_known

    @property
    def _block_load_s(self) -> float:
        return self.block_bytes / self.store.read_bytes_per_s

    def notify(self) -> None:
        if self.on_arrival is not None:
            self.on_arrival()

    def numbers(self, loading: int) -> DiskNumbers:
        store, model_store = self.store, self._model_store
        return DiskNumbers(
            self.loads,
            self.loaded_tokens,
            self.failed_loads,
            model_store.written_bytes if model_store is not None else 0,
            model_store.read_bytes if model_store is not None else 0,
            store.writer.queued_bytes,
            loading,
            store.kept_bytes,
            store.limit,
        )
