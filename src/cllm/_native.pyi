"""The C++ engine, as Python sees it (csrc/module.cpp)."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from cllm.models.spec import ModelSpec

Ints = NDArray[np.int32]

def instruction_sets() -> list[str]:
    """The sets this CPU has, the best one first; "generic" is always there. The system may still refuse amx."""

def end_on_bus_error(line: str, exit_code: int) -> None:
    """From now on SIGBUS, which a mapped file sends when it is cut short or its disk fails, prints `line` to stderr and
    ends the process."""

def pack_roundtrip(ggml_type: int, rows: int, cols: int, data: NDArray[np.uint8]) -> NDArray[np.float32]:
    """A matrix of GGUF's blocks, packed and unpacked again: what the kernels take its weights for. For tests.

    Raises ValueError for a wrong size, an unknown type, or values that are not finite.
    """

def product(
    instruction_set: str, ggml_type: int, rows: int, cols: int, data: NDArray[np.uint8], inputs: NDArray[np.float32]
) -> NDArray[np.float32]:
    """`inputs` [n, cols] times a matrix of GGUF's blocks, transposed: [n, rows], as an engine computes it. For tests.

    Raises ValueError as `pack_roundtrip` does, and for inputs of another length.
    """

class RowSampler:
    """Drawing tokens from rows of logits without sorting them. Any thread may call it. The GIL is released. A row's
    result depends on the row and the arguments alone.

    Raises ValueError for an empty row, and for a `peak` that is not finite.
    """

    def __init__(self, instruction_set: str) -> None:
        """`instruction_set` "auto" takes the best one."""

    def argmax(self, values: NDArray[np.float32]) -> int:
        """The first of the largest values, or the first NaN, so that it also tells whether the row is valid."""

    def masked(self, values: NDArray[np.float32], mask: NDArray[np.int32]) -> NDArray[np.float32]:
        """A copy, with -inf for every token whose bit in `mask` is 0; the lowest bit of a word is its first token.
        Raises ValueError if the mask is shorter."""

    def draw(
        self,
        values: NDArray[np.float32],
        peak: float,
        u: float,
        *,
        temperature: float,
        top_k: int,
        top_p: float,
        min_p: float,
    ) -> int:
        """The token that `u` in [0, 1) selects: temperature, then top_k, top_p and min_p, then the inverse CDF.

        `peak` is the largest of `values`. top_p counts the mass of what top_k left. The CDF runs over the tokens that
        are left, in the order of their ids.
        """

    def log_total(self, values: NDArray[np.float32], peak: float) -> float:
        """The logarithm of the sum of exp(values)."""

    def largest(self, values: NDArray[np.float32], count: int) -> NDArray[np.intp]:
        """Ids of the `count` (at least 1) largest values, in the order of ids. Of equal values the lowest ids; never a
        -inf, even if that leaves fewer than `count`."""

class Engine:
    """A model's weights, its K/V arena and its part of the process's threads. Life: construct, `load` each tensor,
    `seal`, `allocate`, then `step`s. One thread at a time calls it, except `abort`.

    All engines of a process have one pool of threads and take turns, in the order in which they ask: calls that need
    the threads (`load`, `step`, `copy_blocks`, `move_blocks`, `prepare_pages`) wait for those of other engines, asleep.
    """

    def __init__(self, *, instruction_set: str, threads: int, spec: ModelSpec) -> None:
        """`instruction_set` "auto" takes the best one. Raises ValueError with what is wrong with a number, RuntimeError
        if the system has no more threads."""

    @property
    def instruction_set(self) -> str: ...
    @property
    def threads(self) -> int: ...
    @property
    def weight_bytes(self) -> int: ...
    @property
    def kv_bytes(self) -> int: ...
    def load(
        self,
        layer: int,
        role: str,
        ggml_type: int,
        rows: int,
        cols: int,
        data: NDArray[np.uint8],
        first_row: int | None = None,
    ) -> None:
        """Pack one tensor; `data` is copied. `layer` is -1 for what belongs to none. The GIL is released.

        With `first_row`, `data` is that row and those after it of a matrix, one piece after another from row 0 on,
        of a multiple of 16 rows each except for the last.

        Roles: token_embd, output, output_norm, per_layer_token_embd, per_layer_model_proj, per_layer_proj_norm; in
        layers attn_norm, attn_q, attn_k, attn_v, attn_output, attn_q.bias, attn_k.bias, attn_v.bias, attn_output.bias,
        attn_q_norm, attn_k_norm, attn_sinks, post_attention_norm, ffn_norm, ffn_gate, ffn_up, ffn_down, post_ffw_norm,
        layer_output_scale, inp_gate, proj, post_norm; of recurrences attn_qkv, attn_gate, ssm_alpha, ssm_beta, ssm_in,
        ssm_conv1d, ssm_conv1d.bias, ssm_a, ssm_dt.bias, ssm_d, ssm_norm, ssm_out, shortconv.in_proj, shortconv.conv,
        shortconv.out_proj: those that the spec asks for, with the contents that `cllm.models.tensors` says.
        A vector may have several rows; it and a convolution come in one piece. Raises ValueError for a wrong size, an
        unknown type or role, or values that are not finite.
        """

    def seal(self) -> None:
        """All tensors are there. Raises ValueError with what is missing. Without `output` the head is token_embd."""

    def allocate(
        self,
        *,
        cells: int,
        block_size: int,
        type_k: str,
        type_v: str,
        cell_bytes: int = 0,
        groups: Sequence[tuple[Sequence[int], int]] = (),
        state_cells: int = 0,
        states: Sequence[tuple[int, Sequence[tuple[int, int]]]] = (),
        large_pages: bool = True,
    ) -> None:
        """Reserve the arena, of equal cells; memory is taken as it is used. Again: starts anew, empty.

        A group is some layers, and how many cells a block of theirs takes; every layer with K/V of its own is in one.
        Its layers fill a block's cells in their order, each wholly within one cell. Without groups, all layers are one,
        and a block is a cell; then `cell_bytes` may be 0, for as much as that takes.

        A state is a block of `state_cells` cells. `states` says of every layer that has one where each of its parts
        lies (`cllm.models.spec`, `state_parts`): in which of the cells, and from which byte on, a multiple of 64. The
        matrix of a head is stored in tiles of 16 values: [value / 16][key][value % 16].

        `large_pages` asks for pages of 2 MiB, where the OS has them; else for its usual ones.

        Raises ValueError or MemoryError.
        """

    def step(self, tokens: Ints, chunks: Ints, blocks: Ints, logits: NDArray[np.float32]) -> bool:
        """Compute chunks of tokens; False if `abort` ended it early. The GIL is released.

        `tokens` holds those of all chunks, one after another. `chunks` has a row per chunk: number of tokens, first
        position, of how many of its last tokens it wants the logits, number of blocks, and tokens that were dropped and
        kept before it (`cllm.backends.base.Chunk`; what is kept is a multiple of 16). With several groups, two more
        columns for each but the first: the first block of its table, and how many it has. Where layers have a state,
        another two: how many cells it is read from (none at position 0, then it is zero), and how many it is written
        to. `blocks` holds the tables of all chunks, one after another, for every group its blocks' cells, and then
        those two. No chunk may write a cell of a state that it or another one reads or writes. Where a group's layers
        all have a window, what lies wholly behind it may be missing or anything. `logits` has room for all rows that
        are wanted. Raises ValueError if any of that does not fit.
        """

    def read_prompts(
        self,
        tokens: Ints,
        chunks: Ints,
        blocks: Ints,
        logits: NDArray[np.float32],
        wants: Ints,
        targets: Ints,
        logprobs: NDArray[np.float64],
        ranks: Ints,
        top_ids: Ints,
        top_logprobs: NDArray[np.float64],
        hidden: NDArray[np.float64],
    ) -> bool:
        """A `step` whose chunks want more than logits.

        `wants` has a row per chunk: how many of its first tokens are scored, and which of its hidden states are wanted,
        after the last norm (0: none, 1: that of its last token, 2: the sum of all, 3: that of the text's first token).
        `targets` are the tokens that follow those which are scored, of all chunks one after another; for each of them
        there is its log probability, its rank, and the ids and log probabilities of the likeliest tokens, as many as
        `top_ids` has columns. `hidden` has a row per chunk that wants any, to which they are added.
        """

    def abort(self) -> None:
        """End the step in progress at its next layer, from any thread; without one, nothing happens."""

    def copy_blocks(self, pairs: Ints) -> None:
        """Copy whole cells, a row (source, target) each."""

    def move_blocks(self, moves: Ints) -> None:
        """Carry out moves, a row (source, target, count) each, as if one after another; ranges may overlap.

        On all threads; the GIL is released. Raises ValueError or MemoryError before anything is moved.
        """

    def release_pages(self, first: int, count: int) -> None:
        """Give the pages that lie wholly within these cells back to the OS; large ones only whole.

        Raises ValueError, or RuntimeError if the OS refuses.
        """

    def prepare_pages(self, first: int, count: int) -> None:
        """Take the pages of these cells now, on all threads; what they held is lost.

        Raises ValueError, or RuntimeError if the OS refuses.
        """

    def resident_bytes(self) -> int:
        """How much of the arena is in memory, as the OS says; RuntimeError if it does not say."""

    def memory(self) -> NDArray[np.uint8]:
        """All cells of the arena as bytes, a row each; not a copy. It stays valid, and its memory taken, as long as
        somebody has it, also after `allocate` has made another arena."""

    def set_profiling(self, on: bool) -> None:
        """Whether steps note how long their phases take."""

    def profile(self) -> dict[str, float]:
        """Seconds by phase since the last call."""
