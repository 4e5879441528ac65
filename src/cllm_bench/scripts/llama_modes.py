"""Why cLLM runs llama.cpp with one stream per sequence and flash attention.

    python src/cllm_bench/scripts/llama_modes.py --json modes.json

Measures every pair of unified/split and flash attention on/off on the same work: a prompt, one decode step of several
streams, and giving one sequence's content to another. Run it alone on the machine.
"""

from __future__ import annotations

import argparse
import json
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from cllm.backends.base import Chunk
from cllm.backends.llama_cpp.context import Context
from cllm.backends.llama_cpp.library import load_library
from cllm.backends.llama_cpp.model import load_model, read_shape
from cllm.backends.llama_cpp.slots import LlamaSlotOps
from cllm.machine import default_threads, read_cpus
from cllm.models.registry import resolve

STREAMS = 16
PROMPT_TOKENS = 512
WORK = {
    "1 stream": range(1),
    "8 streams": range(8),
    "8 streams, every second id": range(0, 16, 2),
    "16 streams": range(16),
}


class Mode:
    """One way to set llama.cpp up, and the timings of it."""

    def __init__(self, context: Context, args: argparse.Namespace) -> None:
        self._context = context
        self._ops = LlamaSlotOps(context)
        self._repeat: int = args.repeat
        self._length: int = args.context
        self._random = np.random.default_rng(1)

    def measure(self) -> dict[str, float]:
        """Milliseconds of each piece of work, the best of the repetitions."""
        result = {f"prompt of {PROMPT_TOKENS}": self._time(self._prompt, self._empty)}
        self._fill()
        for name, slots in WORK.items():
            result[name] = self._time(lambda slots=slots: self._decode(slots), self._trim)
        result["copy by bytes"] = self._time(self._copy_by_bytes, self._make_target)
        result["copy by seq_cp"] = self._time(self._copy_by_library, self._make_target) - result["1 stream"]
        return result

    def _time(self, work: Callable[[], object], prepare: Callable[[], object]) -> float:
        times = []
        for _ in range(self._repeat):
            prepare()
            start = perf_counter()
            work()
            times.append((perf_counter() - start) * 1e3)
        self._trim()
        return min(times)

    def _tokens(self, count: int) -> array[int]:
        return array("i", self._random.integers(1_000, 20_000, count).tolist())

    def _prompt(self) -> None:
        self._context.decode([Chunk(self._tokens(PROMPT_TOKENS), 0, True, 0)])

    def _decode(self, slots: Sequence[int]) -> None:
        self._context.decode([Chunk(self._tokens(1), self._length, True, slot) for slot in slots])

    def _copy_by_bytes(self) -> None:
        self._ops.copy(0, STREAMS)

    def _copy_by_library(self) -> None:
        # The library moves the data at the next decode, so one belongs to it.
        self._context.library.api.llama_memory_seq_cp(self._context.memory, 0, STREAMS, -1, -1)
        self._decode([0])

    def _fill(self) -> None:
        self._empty()
        self._context.decode([Chunk(self._tokens(self._length), 0, False, 0)])
        for slot in range(1, STREAMS):
            self._ops.copy(0, slot)

    def _trim(self) -> None:
        for slot in range(STREAMS):
            self._ops.remove(slot, self._length)

    def _make_target(self) -> None:
        self._trim()
        self._ops.remove(STREAMS, 0)

    def _empty(self) -> None:
        for slot in range(STREAMS + 1):
            self._ops.remove(slot, 0)


@contextmanager
def open_context(args: argparse.Namespace, model: Any, *, unified: bool, flash: bool) -> Iterator[Context]:
    library = load_library()
    api = library.api
    params = api.llama_context_default_params()
    params.n_seq_max = params.n_outputs_max = STREAMS + 1
    params.n_ctx = params.n_seq_max * args.slot_tokens
    params.kv_unified = unified
    params.n_threads = params.n_threads_batch = args.threads
    params.flash_attn_type = api.LLAMA_FLASH_ATTN_TYPE_ENABLED if flash else api.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.offload_kqv = params.op_offload = False
    context = Context(library, model, params, read_shape(api, model).n_vocab)
    try:
        yield context
    finally:
        context.close()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="name, path or hf:org/repo/file.gguf")
    parser.add_argument("--threads", type=int, default=default_threads(read_cpus()).count)
    parser.add_argument("--context", type=int, default=320, help="tokens that each stream holds")
    parser.add_argument("--slot-tokens", type=int, default=2048, help="tokens that each stream has room for")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the milliseconds there too")
    return parser.parse_args()


def main() -> None:
    args = parse()
    library = load_library()
    model = load_model(library, resolve(args.model), mmap=True, mlock=False)
    results: dict[str, dict[str, float]] = {}
    for unified, flash in product((True, False), (True, False)):
        name = f"{'unified' if unified else 'split'}, {'flash' if flash else 'no flash'}"
        with open_context(args, model, unified=unified, flash=flash) as context:
            results[name] = Mode(context, args).measure()
        print(f"measured: {name}", flush=True)
    library.free_model(model)

    print(f"\nmilliseconds, {args.threads} threads, streams of {args.context} in {args.slot_tokens} tokens")
    print(f"{'':28}" + "".join(f"{mode:>20}" for mode in results))
    for row in next(iter(results.values())):
        print(f"{row:28}" + "".join(f"{times[row]:20.1f}" for times in results.values()))
    if args.json:
        args.json.write_text(json.dumps({"settings": {**vars(args), "json": None}, "ms": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
