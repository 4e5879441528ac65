"""How many bytes a token's K/V takes, and what a byte budget buys.

All of it is exact: a quantised type stores blocks of values with their scale, and those bytes count.
"""

from __future__ import annotations

from dataclasses import dataclass

from cllm.errors import ConfigError
from cllm.kv.ops import BlockGeometry, SlotGeometry

MIB = 1024 * 1024
SLOT_PADDING = 256
"""llama.cpp rounds a sequence's context up to a multiple of this."""
SAVED_TOKEN_OVERHEAD_BYTES = 16
SAVED_OVERHEAD_BYTES = 4096
"""Upper bounds of what a saved sequence needs besides its K/V: a position per token, and a header."""


@dataclass(frozen=True, slots=True)
class KVType:
    name: str
    block_values: int
    block_bytes: int
    row_bytes_beside: int = 0
    """Bytes of the scale of a token's vector, if it has one."""

    def row_bytes(self, values: int) -> int:
        if values % self.block_values:
            raise ConfigError(
                f"K/V type {self.name} stores blocks of {self.block_values} values, which do not divide the model's "
                f"head size of {values}; use f16"
            )
        return values // self.block_values * self.block_bytes + self.row_bytes_beside


KV_TYPES = {
    "f16": KVType("f16", 1, 2),
    "q8_0": KVType("q8_0", 32, 34),
    "q4_0": KVType("q4_0", 32, 18),
    "bf16": KVType("bf16", 1, 2),
    "f32": KVType("f32", 1, 4),
    "fp8": KVType("fp8", 1, 1),
    "int8": KVType("int8", 1, 1, row_bytes_beside=2),
}
CPU_KV_TYPES = ("f16", "q8_0", "q4_0")
"""For native and llama.cpp; the others are torch's."""


def most_bytes(tokens: int, bytes_per_token: int, state_bytes: int = 0) -> int:
    """The most bytes a saved sequence takes."""
    return tokens * (bytes_per_token + SAVED_TOKEN_OVERHEAD_BYTES) + state_bytes + SAVED_OVERHEAD_BYTES


def slot_tokens_within(budget_bytes: int, bytes_per_token: int, running: int, state_bytes: int = 0) -> int:
    """The most tokens per slot that leave room to move a sequence."""
    room = max(0, budget_bytes - (running + 1) * state_bytes)
    return room // ((running + 1) * (bytes_per_token + SAVED_TOKEN_OVERHEAD_BYTES))


@dataclass(frozen=True, slots=True)
class SlotPlan:
    geometry: SlotGeometry
    running: int
    store_bytes: int
    notes: tuple[str, ...]
    """Where the plan differs from the settings, one line each."""


def plan_slots(
    *,
    budget_bytes: int,
    bytes_per_token: int,
    context: int,
    running: int,
    running_is_asked: bool,
    on_demand: bool = False,
    state_bytes: int = 0,
) -> SlotPlan:
    """Slots for `running` sequences of `context` tokens; the rest of the budget is for saved ones. `state_bytes`: of a
    sequence, beside its K/V.

    `on_demand` allocates one slot at the start, if the budget has room to save a whole sequence when slots are added.

    If the budget is too small, fewer sequences run at once; the context is cut only if not even one fits.
    """
    notes: list[str] = []
    slot_tokens = -(-context // SLOT_PADDING) * SLOT_PADDING
    slot_bytes = slot_tokens * bytes_per_token + state_bytes
    affordable = budget_bytes // slot_bytes
    if affordable < 1:
        slot_tokens = (budget_bytes - state_bytes) // bytes_per_token // SLOT_PADDING * SLOT_PADDING
        if slot_tokens < SLOT_PADDING:
            raise ConfigError(
                f"resources.kv_cache_max_memory_mb is {budget_bytes / MIB:.1f} MiB, but {SLOT_PADDING} tokens of this "
                f"model need {(SLOT_PADDING * bytes_per_token + state_bytes) / MIB:.1f} MiB; raise it"
            )
        slot_bytes = slot_tokens * bytes_per_token + state_bytes
        notes.append(
            f"the KV budget of {budget_bytes / MIB:.0f} MiB holds {slot_tokens} tokens: "
            f"max_context_length is {slot_tokens} instead of {context}"
        )
        affordable = 1
    if on_demand and not running_is_asked:  # better fewer than all of them at the start
        movable_beside = (budget_bytes - most_bytes(slot_tokens, bytes_per_token, state_bytes)) // slot_bytes
        affordable = max(1, min(affordable, movable_beside))
    if affordable < running:
        if running_is_asked:
            notes.append(
                f"{running} sequences of {slot_tokens} tokens need "
                f"{running * slot_bytes / MIB:.0f} MiB, "
                f"the KV budget is {budget_bytes / MIB:.0f} MiB: n_seq_max is {affordable} instead of {running}"
            )
        running = affordable
    store_bytes = budget_bytes - running * slot_bytes
    movable = store_bytes >= most_bytes(slot_tokens, bytes_per_token, state_bytes)
    geometry = SlotGeometry(running, slot_tokens, at_start=1 if on_demand and movable else None)
    return SlotPlan(geometry, running, store_bytes, tuple(notes))


def plan_blocks(*, budget_bytes: int, bytes_per_token: int, block_size: int) -> BlockGeometry:
    blocks = budget_bytes // (bytes_per_token * block_size)
    if blocks < 2:
        raise ConfigError(
            f"resources.kv_cache_max_memory_mb is {budget_bytes / MIB:.1f} MiB, but one block of {block_size} tokens "
            f"needs {bytes_per_token * block_size / MIB:.2f} MiB and there must be two; raise it"
        )
    return BlockGeometry(blocks, block_size)
