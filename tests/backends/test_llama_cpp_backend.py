"""The llama.cpp backend on the real model."""

from __future__ import annotations

import logging
import re
import threading
import time
from array import array
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cllm.backends.base import Chunk, Logits
from cllm.backends.llama_cpp import LlamaCppBackend
from cllm.backends.llama_cpp.library import load_library
from cllm.config.kv import WindowConfig
from cllm.engine.params import SamplingParams
from cllm.errors import BackendError, ConfigError, ModelError, StepAbortedError, UnsupportedOperationError
from cllm.kv.ops import BlockGeometry, SlotGeometry, SlotOps
from cllm.kv.sizing import CPU_KV_TYPES
from cllm.loading.facts import ModelFacts
from cllm.loading.text_model import configured_window
from cllm.machine import MemoryLimit
from cllm.models.registry import resolve
from cllm.models.spec import AttentionSpec
from cllm.offline import LLM
from step_of import rows_of
from thorough import slow

pytestmark = pytest.mark.model

SLOTS, SLOT_TOKENS = 4, 512
NOISE = 1.0
"""Logits reach 30; rounding moves them by less than this when a computation is laid out otherwise."""


def make(path: Path | None = None, **settings: Any) -> LlamaCppBackend:
    defaults: dict[str, Any] = {
        "threads": 2,
        "n_batch": 2048,
        "n_ubatch": 512,
        "kv_type_k": "f16",
        "kv_type_v": "f16",
        "flash_attention": True,
        "mmap": True,
        "mlock": False,
    }
    return LlamaCppBackend(path or resolve("smollm2"), **(defaults | settings))


@pytest.fixture(scope="module")
def module_backend() -> Iterator[LlamaCppBackend]:
    with make() as backend:
        assert isinstance(backend, LlamaCppBackend)
        backend.allocate(SlotGeometry(SLOTS, SLOT_TOKENS))
        yield backend


@pytest.fixture
def backend(module_backend: LlamaCppBackend) -> LlamaCppBackend:
    for slot in range(SLOTS):
        module_backend.ops.remove(slot, 0)
    return module_backend


@lru_cache
def tokenise(text: str) -> array[int]:
    api = load_library().api
    model = api.llama_model_default_params()
    model.vocab_only = True
    handle = api.llama_model_load_from_file(str(resolve("smollm2")).encode(), model)
    room = (api.llama_token * 512)()
    raw = text.encode()
    count = api.llama_tokenize(api.llama_model_get_vocab(handle), raw, len(raw), room, len(room), False, False)
    api.llama_model_free(handle)
    return array("i", room[:count])


@pytest.fixture(scope="module")
def prompts() -> list[array[int]]:
    return [
        tokenise("The capital of France is"),
        tokenise("Once upon a time, in a small village by the sea, there lived an old"),
        tokenise("1, 2, 3, 4, 5, 6,"),
        tokenise("def add(a, b):\n    return a"),
    ]


def prefill(backend: LlamaCppBackend, slot: int, tokens: array[int], start: int = 0) -> Logits:
    return rows_of(backend, [Chunk(tokens, start, True, slot)])[0].copy()


def continue_greedily(backend: LlamaCppBackend, slot: int, logits: Logits, count: int = 12) -> list[int]:
    tokens = [int(logits.argmax())]
    while len(tokens) < count:
        logits = prefill(backend, slot, array("i", tokens[-1:]), backend.ops.length(slot))
        tokens.append(int(logits.argmax()))
    return tokens


def generate(backend: LlamaCppBackend, slot: int, prompt: array[int], count: int = 12) -> list[int]:
    return continue_greedily(backend, slot, prefill(backend, slot, prompt), count)


def assert_close(rows: Logits, expected: Sequence[Logits] | Logits) -> None:
    assert np.abs(rows - np.asarray(expected)).max() < NOISE


# -- steps ---------------------------------------------------------------------------------------------------------


def plain_decode(tokens: array[int]) -> Logits:
    """The same logits without any code of ours."""
    api = load_library().api
    model = api.llama_model_load_from_file(str(resolve("smollm2")).encode(), api.llama_model_default_params())
    context = api.llama_init_from_model(model, api.llama_context_default_params())
    ids = (api.llama_token * len(tokens))(*tokens)
    assert api.llama_decode(context, api.llama_batch_get_one(ids, len(tokens))) == 0
    logits = np.ctypeslib.as_array(api.llama_get_logits_ith(context, -1), (49152,)).copy()
    api.llama_free(context)
    api.llama_model_free(model)
    return logits


def test_logits_are_those_of_a_plain_decode(backend: LlamaCppBackend, prompts: list[array[int]]) -> None:
    for slot, prompt in enumerate(prompts):
        ours, plain = prefill(backend, slot, prompt), plain_decode(prompt)
        assert_close(ours, plain)
        assert ours.argmax() == plain.argmax()


def test_chunked_prefill_gives_the_same_continuation(backend: LlamaCppBackend, prompts: list[array[int]]) -> None:
    prompt = prompts[1] + prompts[0]
    expected = generate(backend, 0, prompt)
    for size in (1, 5, 16):
        backend.ops.remove(1, 0)
        for start in range(0, len(prompt), size):
            logits = prefill(backend, 1, prompt[start : start + size], start)
        assert continue_greedily(backend, 1, logits) == expected


def test_rows_come_back_in_the_order_of_the_caller(backend: LlamaCppBackend, prompts: list[array[int]]) -> None:
    alone = [prefill(backend, 0, prompt) for prompt in prompts if not backend.ops.remove(0, 0)]
    for slots in ((0, 1, 2, 3), (2, 0, 3, 1), (3, 2, 1, 0)):
        for slot in range(SLOTS):
            backend.ops.remove(slot, 0)
        rows = rows_of(backend, [Chunk(prompt, 0, True, slot) for slot, prompt in zip(slots, prompts, strict=True)])
        assert_close(rows, alone)


def test_only_chunks_that_want_logits_get_a_row(backend: LlamaCppBackend, prompts: list[array[int]]) -> None:
    alone = prefill(backend, 0, prompts[2])
    backend.ops.remove(0, 0)
    rows = rows_of(
        backend, [Chunk(prompts[0], 0, False, 3), Chunk(prompts[2], 0, True, 0), Chunk(prompts[1], 0, False, 1)]
    )
    assert rows.shape == (1, backend.spec.n_vocab)
    assert_close(rows[0], alone)
    assert rows_of(backend, [Chunk(prompts[0], 0, False, 2)]).shape == (0, backend.spec.n_vocab)
    assert rows_of(backend, []).shape == (0, backend.spec.n_vocab)


def test_rows_in_the_order_of_slots_are_not_copied(backend: LlamaCppBackend, prompts: list[array[int]]) -> None:
    first = rows_of(backend, [Chunk(prompts[0], 0, True, 0), Chunk(prompts[1], 0, True, 1)])
    second = rows_of(backend, [Chunk(prompts[2], 0, True, 2), Chunk(prompts[3], 0, True, 3)])
    assert np.shares_memory(first, second)


def test_decodes_and_a_prompt_in_one_step(backend: LlamaCppBackend, prompts: list[array[int]]) -> None:
    expected = [generate(backend, slot, prompt, 2) for slot, prompt in enumerate(prompts)]
    for slot, prompt in enumerate(prompts):
        backend.ops.remove(slot, 0)
        if slot != 1:
            prefill(backend, slot, prompt)
    chunks = [
        Chunk(array("i", expected[slot][:1]), len(prompts[slot]), True, slot) if slot != 1 else
        Chunk(prompts[1], 0, True, 1)
        for slot in (3, 1, 0, 2)
    ]  # fmt: skip
    assert rows_of(backend, chunks).argmax(axis=1).tolist() == [
        expected[3][1], expected[1][0], expected[0][1], expected[2][1]
    ]  # fmt: skip


def test_a_step_larger_than_the_batch(backend: LlamaCppBackend, prompts: list[array[int]]) -> None:
    alone = [prefill(backend, slot, prompt) for slot, prompt in enumerate(prompts)]
    with make(n_batch=7, n_ubatch=4) as small:
        small.allocate(SlotGeometry(SLOTS, 256))
        assert sum(map(len, prompts)) > 4 * 7
        order = (2, 1, 3, 0)
        rows = rows_of(small, [Chunk(prompts[slot], 0, True, slot) for slot in order])
        assert_close(rows, [alone[slot] for slot in order])


def test_batch_splits_are_what_llama_cpp_does(
    prompts: list[array[int]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("LLAMA_BATCH_DEBUG", "1")
    caplog.set_level(logging.DEBUG, "cllm.llama_cpp")
    one = array("i", [5])
    with make(n_ubatch=8) as backend:
        backend.allocate(SlotGeometry(SLOTS, 256))
        for chunks in (
            [Chunk(one, 0, False, slot) for slot in range(4)],
            [Chunk(one, 1, False, 3), Chunk(one, 1, False, 1)],
            [Chunk(prompts[1], 1, False, 2), Chunk(one, 1, False, 0), Chunk(prompts[0], 2, False, 3)],
        ):
            caplog.clear()
            before = backend.batch_splits
            rows_of(backend, chunks)
            passes = sum("added ubatch" in record.message for record in caplog.records)
            assert backend.batch_splits - before == passes - 1


# -- memory --------------------------------------------------------------------------------------------------------


def test_length_follows_what_is_computed_and_removed(backend: LlamaCppBackend, prompts: list[array[int]]) -> None:
    ops, prompt = backend.ops, prompts[1]
    assert isinstance(ops, SlotOps)
    assert ops.length(2) == 0
    prefill(backend, 2, prompt)
    assert [ops.length(slot) for slot in range(SLOTS)] == [0, 0, len(prompt), 0]
    ops.remove(2, 5)
    assert ops.length(2) == 5
    ops.remove(2, 0)
    assert ops.length(2) == 0


def test_a_trimmed_slot_goes_on_as_if_the_tail_had_never_been(
    backend: LlamaCppBackend, prompts: list[array[int]]
) -> None:
    expected = generate(backend, 0, prompts[1])
    generate(backend, 1, prompts[1] + prompts[3])
    backend.ops.remove(1, len(prompts[1]) - 1)
    logits = prefill(backend, 1, prompts[1][-1:], len(prompts[1]) - 1)
    assert continue_greedily(backend, 1, logits) == expected


def test_a_copy_goes_on_like_its_source(backend: LlamaCppBackend, prompts: list[array[int]]) -> None:
    ops, prompt = backend.ops, prompts[1]
    logits = prefill(backend, 3, prompt)
    ops.copy(3, 0)
    assert ops.length(0) == ops.length(3) == len(prompt)
    expected = continue_greedily(backend, 3, logits)
    assert continue_greedily(backend, 0, logits) == expected
    ops.remove(3, 0)
    assert ops.length(0) == len(prompt) + len(expected) - 1


def test_what_is_saved_outlives_the_context(backend: LlamaCppBackend, prompts: list[array[int]]) -> None:
    ops, prompt = backend.ops, prompts[1]
    logits = prefill(backend, 0, prompt)
    saved = ops.save(0)
    expected = continue_greedily(backend, 0, logits)
    per_token = backend.kv_bytes // (SLOTS * SLOT_TOKENS)
    assert len(prompt) * per_token < saved.nbytes < len(prompt) * (per_token + 12) + 1024

    backend.rebuild()
    assert backend.ops is ops
    assert [ops.length(slot) for slot in range(SLOTS)] == [0] * SLOTS
    ops.load(2, saved)
    assert ops.length(2) == len(prompt)
    assert continue_greedily(backend, 2, logits) == expected


def advance_together(backend: LlamaCppBackend, prompts: list[array[int]], sizes: Sequence[int]) -> list[Logits]:
    """One sequence more every few steps, all of them computed together; all rows. Before each comes, and once more in
    the end, there are as many slots as `sizes` says, if it says so."""
    ops, last, rows = backend.ops, [], []
    for number in range(len(prompts) + 1):
        if sizes:
            saved = [ops.save(slot) for slot in range(len(last))]
            ops.resize(sizes[number])
            assert [ops.length(slot) for slot in range(sizes[number])] == [0] * sizes[number]
            for slot, content in reversed(list(enumerate(saved))):
                before = content.copy()
                ops.load(slot, content)
                assert np.array_equal(ops.save(slot)[16:], before[16:])  # after the header and the number of slots
        if number < len(prompts):
            rows.append(prefill(backend, number, prompts[number]))
            last.append(int(rows[-1].argmax()))
        for _ in range(4):
            step = rows_of(
                backend, [Chunk(array("i", [token]), ops.length(slot), True, slot) for slot, token in enumerate(last)]
            )
            rows += list(step.copy())
            last = step.argmax(axis=1).tolist()
    return rows


@slow
def test_sequences_go_on_to_the_bit_with_another_number_of_slots(prompts: list[array[int]]) -> None:
    with make() as fixed, make() as changing:
        fixed.allocate(SlotGeometry(6, 256))
        assert changing.resizes_slots
        changing.allocate(SlotGeometry(6, 256, at_start=1))
        slot_bytes = changing.kv_bytes
        assert fixed.kv_bytes == 6 * slot_bytes
        expected = advance_together(fixed, prompts, ())
        rows = advance_together(changing, prompts, (1, 2, 6, 5, 4))
        assert changing.kv_bytes == 4 * slot_bytes
        assert np.array_equal(rows, expected)


def test_what_is_saved_in_one_slot_of_few_is_loaded_into_another_of_many(
    backend: LlamaCppBackend, prompts: list[array[int]]
) -> None:
    expected = generate(backend, 0, prompts[1])
    with make() as changing:
        changing.allocate(SlotGeometry(8, 256, at_start=3))
        logits = prefill(changing, 2, prompts[1])
        saved = changing.ops.save(2)
        for slots, slot in ((8, 5), (1, 0), (2, 1), (3, 0)):
            changing.ops.resize(slots)
            changing.ops.load(slot, saved)
            assert changing.ops.length(slot) == len(prompts[1])
            assert continue_greedily(changing, slot, logits) == expected


def test_a_context_that_cannot_be_made_leaves_room_for_another(prompts: list[array[int]]) -> None:
    with make() as backend:
        backend.allocate(SlotGeometry(4, 256, at_start=1))
        expected = generate(backend, 0, prompts[0])
        backend.ops.remove(0, len(prompts[0]))
        saved = backend.ops.save(0)
        with pytest.raises(BackendError, match="257 sequences"):
            backend.ops.resize(257)
        backend.ops.resize(2)
        backend.ops.load(1, saved)
        logits = prefill(backend, 1, array("i", expected[:1]), len(prompts[0]))
        assert continue_greedily(backend, 1, logits, 11) == expected[1:]
        backend.rebuild()
        with pytest.raises(BackendError, match="there are 1"):
            backend.ops.length(1)


def test_slots_that_the_machine_has_no_memory_for_are_refused_before_they_are_taken(
    prompts: list[array[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with make() as backend:
        backend.allocate(SlotGeometry(4, 256, at_start=1))
        prefill(backend, 0, prompts[0])
        room = MemoryLimit("the container's memory limit", 1 << 30, 2 * backend.kv_bytes, hard=True)
        monkeypatch.setattr("cllm.backends.llama_cpp.slots.read_memory_limits", lambda: [room])
        with pytest.raises(BackendError, match=r"4 slots need 17 MiB more, .* the 11 MiB that the container's memory"):
            backend.ops.resize(4)
        assert backend.ops.length(0) == len(prompts[0])
        backend.ops.resize(3)
        backend.ops.resize(1)


@slow
def test_slots_on_demand_in_a_running_server() -> None:
    """Eight at once, and again after a quiet time, give the answers that all slots from the start give."""
    texts = [f"{beginning} {number}" for number in (1, 2) for beginning in ("I count:", "Once", "Paris is", "def add")]
    greedy = SamplingParams(max_tokens=12, temperature=0.0)
    answers: dict[bool, list[str]] = {}
    for on_demand in (True, False):
        settings = {
            "backend.llama_cpp.slots_on_demand": on_demand,
            "resources.max_context_length": 256,
            "resources.kv_cache_max_memory_mb": 128.0,
            "kv.release_after_s": 0.2,
            "kv.idle_mb": 0.0,
        }
        with LLM(backend="llama_cpp", settings=settings) as llm:
            answers[on_demand] = [answer.text for answer in llm.generate(texts, greedy, progress=False)]
            if on_demand:
                deadline = time.monotonic() + 60
                while llm.kv()["details"]["slots_now"] > 1:
                    assert time.monotonic() < deadline, "memory is not given back"
                    time.sleep(0.05)
                assert llm.kv()["details"]["rebuilds"] >= 2
            answers[on_demand] += [answer.text for answer in llm.generate(texts, greedy, progress=False)]
            assert llm.kv()["details"]["slots_now"] == llm.kv()["details"]["slots_at_most"] == 8
    assert answers[True] == answers[False]


def test_damaged_bytes_are_refused(backend: LlamaCppBackend, prompts: list[array[int]]) -> None:
    prefill(backend, 0, prompts[0])
    saved = backend.ops.save(0)
    with pytest.raises(BackendError, match="slot 1"):
        backend.ops.load(1, saved[:-100])
    with pytest.raises(BackendError, match="slot 1"):
        backend.ops.load(1, np.zeros(1000, np.uint8))
    assert backend.ops.length(1) == 0


@pytest.mark.parametrize("then", ["step", "copy", "save"])
def test_a_shifted_slot_goes_on_as_before(backend: LlamaCppBackend, prompts: list[array[int]], then: str) -> None:
    """RoPE is relative, so a whole sequence moved by 100, and what comes after it, gives the same logits."""
    ops, prompt = backend.ops, prompts[1]
    end = len(prompt) + 100
    prefill(backend, 0, prompt)
    expected = prefill(backend, 0, prompts[2], len(prompt))

    prefill(backend, 1, prompt)
    ops.shift(1, 0, None, 100)
    assert ops.length(1) == end
    slot = 1
    if then == "copy":
        ops.copy(1, slot := 2)
    if then == "save":
        ops.load(slot := 2, ops.save(1))
    assert ops.length(slot) == end
    shifted = prefill(backend, slot, prompts[2], end)
    assert_close(shifted, expected)
    assert shifted.argmax() == expected.argmax()


def test_a_range_in_the_middle_is_cut_out(backend: LlamaCppBackend) -> None:
    ops = backend.ops
    counting, goes_on = tokenise(", ".join(map(str, range(1, 60))) + ","), tokenise(" 60, 61, 62,")
    prefill(backend, 0, counting[:-1])
    ops.remove(0, 20, 60)
    ops.shift(0, 60, None, -40)
    assert ops.length(0) == len(counting) - 41
    # The recent part is whole, so counting goes on where it was.
    logits = prefill(backend, 0, counting[-1:], len(counting) - 41)
    assert continue_greedily(backend, 0, logits, len(goes_on)) == goes_on.tolist()
    assert ops.length(0) == len(counting) - 40 + len(goes_on) - 1


@pytest.mark.parametrize(("type_k", "type_v"), [("q4_0", "f16"), ("q8_0", "q4_0")])
def test_windows_are_refused_for_keys_that_would_not_survive_them(type_k: str, type_v: str) -> None:
    with make(kv_type_k=type_k, kv_type_v=type_v) as backend:
        backend.allocate(SlotGeometry(1, 256))
        facts = ModelFacts(
            "m", "", 0, backend.traits, backend.spec, 256, "", bytes_per_token=1, unit_tokens=1, groups=()
        )
        asked = WindowConfig(recent=64)
        if type_k != "q4_0":
            assert configured_window(asked, facts) is not None
            return
        with pytest.raises(ConfigError, match=r"kv\.window: .*4-bit keys do not survive; set resources\.kv_type_k to"):
            configured_window(asked, facts)
        with pytest.raises(UnsupportedOperationError, match="4-bit keys"):
            backend.ops.shift(0, 0, None, 1)


def test_a_shift_past_the_end_is_refused(backend: LlamaCppBackend, prompts: list[array[int]]) -> None:
    prefill(backend, 0, prompts[0])
    with pytest.raises(BackendError, match="shifting slot 0"):
        backend.ops.shift(0, 0, None, SLOT_TOKENS)
    assert backend.ops.length(0) == len(prompts[0])


def test_slots_that_do_not_exist(backend: LlamaCppBackend) -> None:
    for slot in (-1, SLOTS, 1000):
        with pytest.raises(BackendError, match=f"slot {slot}"):
            backend.ops.length(slot)
        with pytest.raises(BackendError, match=f"slot {slot}"):
            backend.ops.remove(slot, 0)
        with pytest.raises(BackendError, match=f"slot {slot}"):
            backend.ops.copy(slot, 0)


# -- trouble -------------------------------------------------------------------------------------------------------


def test_abort_from_another_thread(backend: LlamaCppBackend, prompts: list[array[int]]) -> None:
    expected = generate(backend, 0, prompts[1])
    backend.ops.remove(0, 0)
    long = prompts[1] * (SLOT_TOKENS // len(prompts[1]))
    raised: list[BaseException] = []

    def run() -> None:
        try:
            rows_of(backend, [Chunk(long, 0, True, 0)])
        except BackendError as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    while thread.is_alive():
        backend.abort()  # again and again, since a step that only begins clears it
        thread.join(0.01)
    assert isinstance(raised[0], StepAbortedError)
    assert not raised[0].fatal

    assert backend.ops.length(0) < len(long)
    backend.ops.remove(0, 0)
    assert generate(backend, 0, prompts[1]) == expected


def test_abort_between_steps_does_nothing(backend: LlamaCppBackend, prompts: list[array[int]]) -> None:
    backend.abort()
    assert prefill(backend, 0, prompts[0]).any()


@pytest.mark.parametrize(
    ("chunks", "message"),
    [
        ([Chunk(array("i", [1, 2]), 7, True, 0)], "slot 0 holds 0 positions, but its chunk starts at 7"),
        ([Chunk(array("i", [1]), 0, True, 1)], "slot 1 holds .* positions, but its chunk starts at 0"),
        ([Chunk(array("i", [1]), 0, True, SLOTS)], "slot 4 does not exist"),
        ([Chunk(array("i", [49152]), 0, True, 0)], "49152"),
        ([Chunk(array("i", [1]), 0, True, 0), Chunk(array("i", [2]), 1, True, 0)], "two chunks"),
        ([Chunk(array("i", [1] * 513), 0, True, 0)], "room for 512 positions, not 513"),
        ([Chunk(array("i"), 0, True, 0)], "no tokens"),
    ],
)
def test_a_bad_chunk_is_an_error_and_no_more(
    backend: LlamaCppBackend, prompts: list[array[int]], chunks: list[Chunk], message: str
) -> None:
    expected = generate(backend, 1, prompts[1], 4)
    with pytest.raises(BackendError, match=message) as caught:
        rows_of(backend, chunks)
    assert not caught.value.fatal
    assert "\n" not in str(caught.value)
    assert backend.ops.length(0) == 0
    backend.ops.remove(1, 0)
    assert generate(backend, 1, prompts[1], 4) == expected


def test_a_rebuilt_context_is_empty_and_works(backend: LlamaCppBackend, prompts: list[array[int]]) -> None:
    expected = generate(backend, 0, prompts[1])
    backend.ops.shift(0, 0, None, 3)  # not applied yet: must not reach the new context
    backend.rebuild()
    assert backend.ops.length(0) == 0
    assert generate(backend, 0, prompts[1]) == expected


# -- construction --------------------------------------------------------------------------------------------------


def test_shape_and_description(backend: LlamaCppBackend) -> None:
    spec, attention = backend.spec, backend.spec.layers[0].attention
    assert (spec.architecture, spec.n_layers, spec.n_embd, spec.context_length) == ("llama", 30, 576, 8192)
    assert attention == AttentionSpec(9, 3, 64, 64)
    assert spec.n_vocab == 49152
    assert re.fullmatch(
        r"llama\.cpp \((xllamacpp|llama-cpp-python) [\d.]+, [\w ]+, 2 threads, K f16, V f16, flash attention\)",
        backend.describe(),
    )


@pytest.mark.parametrize(
    ("kv_type_k", "kv_type_v", "flash_attention"),
    [(*pair, True) for pair in product(CPU_KV_TYPES, repeat=2)] + [(type_k, "f16", False) for type_k in CPU_KV_TYPES],
)
def test_kv_types(
    prompts: list[array[int]],
    caplog: pytest.LogCaptureFixture,
    kv_type_k: str,
    kv_type_v: str,
    flash_attention: bool,
) -> None:
    caplog.set_level(logging.DEBUG, "cllm.llama_cpp")
    with make(kv_type_k=kv_type_k, kv_type_v=kv_type_v, flash_attention=flash_attention) as backend:
        backend.allocate(SlotGeometry(3, 500))
        logged = [re.search(r"KV buffer size = +([\d.]+) MiB", record.message) for record in caplog.records]
        mebibytes = sum(float(match[1]) for match in logged if match)
        assert backend.kv_bytes == pytest.approx(mebibytes * 2**20, rel=0.01)

        paris = tokenise(" Paris")[0]
        logits = prefill(backend, 1, prompts[0])
        assert logits.argmax() == paris
        backend.ops.copy(1, 0)
        assert continue_greedily(backend, 0, logits, 6) == continue_greedily(backend, 1, logits, 6)


def test_impossible_settings_name_their_keys() -> None:
    with pytest.raises(ConfigError, match=r"resources\.kv_type_v.*backend\.llama_cpp\.flash_attention"):
        make(kv_type_v="q8_0", flash_attention=False)
    with pytest.raises(ConfigError, match=r"resources\.kv_type_k.*'q5_1'.*f16, q8_0, q4_0"):
        make(kv_type_k="q5_1")
    with make(n_batch=8) as backend:
        with pytest.raises(ConfigError, match=r"n_seq_max is 257.* 256"):
            backend.allocate(SlotGeometry(257, 256))
        with pytest.raises(ConfigError, match=r"n_batch is 8.*9"):
            backend.allocate(SlotGeometry(9, 256))
        with pytest.raises(BackendError, match="slots"):
            backend.allocate(BlockGeometry(16, 16))


def test_files_that_are_no_model(tmp_path: Path) -> None:
    truncated, foreign = tmp_path / "truncated.gguf", tmp_path / "foreign.gguf"
    with resolve("smollm2").open("rb") as file:
        truncated.write_bytes(file.read(8_000_000))
    foreign.write_bytes(b"not a model " * 1000)
    for path in (truncated, foreign, tmp_path / "missing.gguf"):
        with pytest.raises(ModelError, match=re.escape(str(path))) as caught:
            make(path)
        assert "\n" not in str(caught.value)
        assert "no reason" not in str(caught.value)


def test_close_is_final_and_may_be_repeated(prompts: list[array[int]]) -> None:
    backend = make()
    with pytest.raises(BackendError, match="allocate"):
        rows_of(backend, [Chunk(prompts[0], 0, True, 0)])
    backend.allocate(SlotGeometry(1, 256))
    ops = backend.ops
    prefill(backend, 0, prompts[0])
    backend.close()
    backend.close()
    backend.abort()
    for use in (
        backend.rebuild,
        lambda: rows_of(backend, [Chunk(prompts[0], 0, True, 0)]),
        lambda: ops.save(0),
        lambda: ops.length(0),
    ):
        with pytest.raises(BackendError) as caught:
            use()
        assert caught.value.fatal


def test_without_drafts_no_rows_of_logits_are_reserved_for_them() -> None:
    for drafts, rows in ((True, SLOTS + LlamaCppBackend.traits.most_drafts), (False, SLOTS)):
        with make(drafts=drafts) as backend:
            assert (backend.traits.most_drafts > 0) == drafts
            backend.allocate(SlotGeometry(SLOTS, SLOT_TOKENS))
            assert backend._live().most_rows == rows
    with LLM("smollm2", backend="llama_cpp", settings={"drafts.enabled": False}) as llm:
        engine = llm._llm.executor.engine
        assert engine is not None and engine.backend.traits.most_drafts == 0
