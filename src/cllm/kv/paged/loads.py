"""Loads into the arena: blocks of a waiting sequence come back from host memory or from disk."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cllm.errors import BackendError, describe
from cllm.kv.block_names import TOKEN_BYTES, chain, local_names, state_names
from cllm.kv.disk.store import ModelStore
from cllm.kv.paged.arena import Arena
from cllm.kv.paged.block_table import BlockMatch
from cllm.kv.paged.local import LocalMemory
from cllm.kv.paged.offload import BlockOffload
from cllm.kv.paged.tables import BlockTables
from cllm.kv.sequence import KVSequence
from cllm.kv.tiers.disk_tier import DiskTier
from cllm.kv.tiers.host_tier import HostTier, HostTransfer
from cllm.kv.tiers.loads import NO_LOAD, Load, LoadingSequence, LoadQueue, Transfer
from cllm.kv.tiers.tiers import Tiers

HOST_LOOK_S = 0.0005
"""While idle, how often copies that a sequence waits for are polled."""


class BlockLoads:
    def __init__(
        self, arena: Arena, tiers: Tiers, tables: BlockTables, offload: BlockOffload, clock: Callable[[], float]
    ) -> None:
        self.queue = LoadQueue(self._find, self._finish, clock)
        self._arena = arena
        self._tiers = tiers
        self._tables = tables
        self._offload = offload
        self._clock = clock

    def fetch(self, sequence: KVSequence) -> bool:
        self._settle()
        return self.queue.fetch(sequence)

    def collect(self) -> None:
        self._settle()
        self.queue.collect()

    def due_at(self) -> float | None:
        copied = any(isinstance(load.transfer, HostTransfer) for load in self.queue)
        deadline = self.queue.due_at()
        if not copied:
            return deadline
        look_at = self._clock() + HOST_LOOK_S
        return look_at if deadline is None else min(look_at, deadline)

    def end(self, seconds: float) -> None:
        def flush() -> None:
            self._settle()
            self._tiers.flush()

        self.queue.end(seconds, flush)

    def forget(self) -> None:
        self.queue.forget()
        self._count()

    def _settle(self) -> None:
        """Copies that are done are finished."""
        if self._tiers.host is not None:
            self._tiers.host.settle()
            self._offload.count_copies()

    def _count(self) -> None:
        """Update which blocks must not move."""
        self._arena.loads = len(self.queue)
        self._arena.loading_blocks = sum(len(load.names) for load in self.queue)
        self._offload.count_copies()

    # -- finding -----------------------------------------------------------------------------------------------

    def _find(self, sequence: KVSequence) -> Load | None:
        host, disk, prefixes = self._tiers.host, self._tiers.disk, self._arena.prefixes
        came = sequence.load
        if host is not None and (not len(host) or (isinstance(came, Load) and came.requester is sequence)):
            host = None  # what it had has been loaded
        if host is None and self._tiers.model_store is None:
            return NO_LOAD if disk is None else None
        found = prefixes.find(sequence.prefix.tobytes(), sequence.space)
        missing = (len(sequence.prefix) - 1) // self._arena.block_size - found.matched // prefixes.tree.unit_bytes
        if missing < min(each.least_blocks for each in (host, disk) if each is not None):
            return NO_LOAD
        if not self._tables.room_for(sequence, found):
            return None
        load = NO_LOAD if host is None else self._find_on_host(host, sequence, found)
        if load is None:  # `found` is out of date
            load, found = NO_LOAD, prefixes.find(sequence.prefix.tobytes(), sequence.space)
        if load is NO_LOAD and disk is not None:
            return self._find_on_disk(disk, sequence, found)
        return load

    def _find_on_host(self, host: HostTier, sequence: KVSequence, found: BlockMatch) -> Load | None:
        """None: the load failed to start, and `found` is out of date."""
        names = host.find(self._arena.prefixes.name_before(found, sequence.space), self._missing(sequence, found))
        if len(names) < host.least_blocks:
            return NO_LOAD
        if (load := self.queue.bringing(names[0])) is not None:
            return load
        wait_s = host.wait_limit(len(names))
        if wait_s is None:
            return NO_LOAD
        load = self._load(sequence, found, names, wait_s)
        try:
            with host.busy(names):  # making room may evict other blocks to host memory
                self._begin(load, found, lambda blocks: host.load(names, blocks))
        except BackendError as error:
            host.fault("loading blocks from host memory", error)
            return None
        return load

    def _find_on_disk(self, disk: DiskTier, sequence: KVSequence, found: BlockMatch) -> Load | None:
        model_store = disk.model_store
        if model_store is None:
            return None
        size, tokens = self._arena.block_size, self._missing(sequence, found)
        before = self._arena.prefixes.name_before(found, sequence.space)
        first = chain(before, tokens[: size * TOKEN_BYTES], size)
        if not first:
            return NO_LOAD
        if (load := self.queue.bringing(first[0])) is not None:
            return load
        if not model_store.held(first[:1]):  # most prompts are not on disk: skip naming the rest
            return NO_LOAD
        names = [*first, *chain(first[-1], tokens[size * TOKEN_BYTES :], size)]
        names = names[: model_store.held(names)]
        cells: list[bytes] = []
        if self._arena.local is not None:
            end, cells = self._snapshot_on_disk(self._arena.local, model_store, found, names)
            names = names[:end]
        wait_s = disk.wait_limit(len(names), (len(names) + len(cells)) * disk.block_bytes)
        if wait_s is None or not self._tables.room_for_load(found, len(names) + len(cells)):
            return NO_LOAD
        load = self._load(sequence, found, names, wait_s)
        load.names = frozenset((*names, *cells))

        def begin(blocks: list[int]) -> Transfer:
            if cells:
                assert load.holder is not None
                blocks = blocks + self._tables.begin_local(load.holder, len(cells))
            load.buffers = self._arena.content.landing(blocks)
            return model_store.load([*names, *cells], load.buffers, lambda _: disk.on_arrival())

        try:
            self._begin(load, found, begin)
        except Exception as error:
            disk.fault("loading blocks from disk", error)
            return NO_LOAD
        return load

    def _snapshot_on_disk(
        self, local: LocalMemory, model_store: ModelStore, found: BlockMatch, names: list[bytes]
    ) -> tuple[int, list[bytes]]:
        """The most of these blocks, which follow what was found, behind which all layers can go on, and the names of
        the cells that this needs."""
        path, size = [*self._arena.prefixes.names_of(found), *names], self._arena.block_size
        cached, shape, held = len(path) - len(names), local.shape, model_store.held
        there = bytes(held(local_names([name], 1)) for name in path) if shape.cells else b""
        for end in range(len(path), cached, -1):
            if shape.cells and there.find(0, local.first_needed(end * size), end) >= 0:
                continue
            if shape.state and not held(state_names(path[end - 1], 1)):
                continue
            wanted = local.cell_names(path, end)
            if held(wanted) == len(wanted):
                return end - cached, wanted
        return 0, []

    def _missing(self, sequence: KVSequence, found: BlockMatch) -> bytes:
        """The tokens of the whole blocks that follow what was found; the last token is always computed."""
        key = sequence.prefix[:-1].tobytes()
        return key[found.matched : len(key) - len(key) % self._arena.prefixes.tree.unit_bytes]

    # -- beginning and finishing -------------------------------------------------------------------------------

    def _load(self, sequence: KVSequence, found: BlockMatch, names: Sequence[bytes], wait_s: float) -> Load:
        cached = found.matched // self._arena.prefixes.tree.unit_bytes
        tokens = sequence.prefix[: (cached + len(names)) * self._arena.block_size]
        holder = LoadingSequence(tokens, space=sequence.space)
        return Load(sequence, holder, first=cached, names=frozenset(names), deadline=self._clock() + wait_s)

    def _begin(self, load: Load, found: BlockMatch, begin: Callable[[list[int]], Transfer]) -> None:
        """Allocate blocks for a load, which are known to be available, and start it. On failure nothing has changed."""
        holder = load.holder
        assert holder is not None
        own = self._tables.begin(holder, found, len(holder.tokens) // self._arena.block_size - load.first)
        try:
            load.transfer = begin(own)
        except Exception:
            self._tables.drop_local(holder)  # nothing was loaded into it, so no snapshot may be taken of it
            self._release(holder)
            raise
        self.queue.add(load)
        self._count()

    def _finish(self, load: Load) -> None:
        holder, transfer = load.holder, load.transfer
        assert holder is not None and transfer is not None
        self._count()
        try:
            if isinstance(transfer, HostTransfer):
                loaded = self._finish_from_host(transfer)
                load.more = loaded == len(load.names)
            else:
                loaded = self._finish_from_disk(transfer.loaded, holder, load)
        finally:
            load.end()
        holder.num_computed += loaded * self._arena.block_size
        self._release(holder)

    def _finish_from_host(self, moved: HostTransfer) -> int:
        host, loaded = self._tiers.host, moved.loaded
        assert host is not None
        if loaded:
            host.land(moved)
        host.note_load(loaded * self._arena.block_size, len(moved.blocks) * self._arena.block_size)
        self._tiers.notify()  # nobody else does
        return loaded

    def _finish_from_disk(self, loaded: int, holder: LoadingSequence, load: Load) -> int:
        """How many blocks arrived. Without all its cells, a snapshot is none."""
        disk, own = self._tiers.disk, holder.blocks[load.first :]
        asked, cells = len(own), self._tables.local_cells(holder)
        assert disk is not None
        own = own + cells
        try:
            if loaded:
                self._arena.content.land(own[:loaded], load.buffers[:loaded])
                disk.worked()
        except BackendError as error:
            disk.fault("loading blocks from disk", error)
            loaded = 0
        whole = loaded == len(own)
        if not whole:
            self._tables.drop_local(holder)
        loaded = min(loaded, asked)
        of_use = loaded if whole or len(own) == asked else 0
        disk.note_load(of_use * self._arena.block_size, asked * self._arena.block_size)
        return loaded

    def _release(self, holder: LoadingSequence) -> None:
        """Release a load's memory; what was loaded stays cached. Nothing else knows of it: if that fails, all memory is
        in doubt."""
        try:
            self._arena.commit(holder)
            self._tables.keep_last_window(holder)
            self._tables.end(holder)
        except Exception as error:
            raise BackendError(f"releasing loaded blocks failed: {describe(error)}", fatal=True) from error
