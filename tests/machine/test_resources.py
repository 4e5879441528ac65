"""Threads and K/V budget: which limit decides, what the log says, what is refused before it is loaded."""

from __future__ import annotations

import logging
import resource
import subprocess
import sys
from array import array
from pathlib import Path

import pytest

from cllm.backends.base import Chunk
from cllm.config.schema import ResourcesConfig
from cllm.errors import BackendError, ConfigError, ModelError
from cllm.kv.groups import KVGroup, KVLayout, StateGroup
from cllm.kv.ops import BlockGeometry
from cllm.kv.paged.local import LocalShape, tokens_within
from cllm.kv.sizing import MIB, plan_blocks
from cllm.loading import open_model
from cllm.loading.resources import Weights, check_local_room, choose_kv_bytes, choose_threads, local_bytes
from cllm.machine import Cpus, MemoryLimit, default_threads, read_cpus
from cllm.models.gguf import GGUFModel
from loading_kit import parts_of
from native_kit import WEIGHT_TYPES, write_model
from repository import KITS
from step_of import rows_of

HOST = MemoryLimit("the machine's memory", 64_000 * MIB, 40_000 * MIB, hard=False)
CONTAINER = MemoryLimit("the container's memory limit", 2048 * MIB, 2000 * MIB, hard=True)
ADDRESSES = MemoryLimit("ulimit -v", 2148 * MIB, 2048 * MIB, hard=True, counts_mapped=True)
WEIGHTS = Weights("m.gguf", 400 * MIB)
MAPPED = Weights("m.gguf", 400 * MIB, mapped=True)


@pytest.fixture(autouse=True)
def everything_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "cllm")


@pytest.fixture(autouse=True)
def no_number_of_threads_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CLLM_BACKEND__THREADS", raising=False)


def levels(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.levelname for record in caplog.records]


def budget(*rooms: MemoryLimit, weights: Weights = WEIGHTS, **settings: float) -> int:
    return choose_kv_bytes(ResourcesConfig(**settings), weights, rooms)  # type: ignore[arg-type]


# --- layers with a window ---


@pytest.mark.parametrize("context", [16, 100, 512, 1024, 100_000])
def test_a_window_takes_no_more_than_the_context(context: int) -> None:
    """A budget for one whole context is enough where the context is short, and else one for two windows."""
    shape, layout = LocalShape(1024, cells=3, ahead=512), KVLayout(16, 1000 * 16, (KVGroup((0,), 0, 1),) * 2)
    most = -(-1024 // 16) + -(-512 // 16) + 1
    needed = local_bytes(shape, layout, context)
    assert needed == min(most, -(-context // 16)) * 3 * 16_000
    least = needed + min(needed, context * 1000)
    check_local_room(least, needed, 0, context * 1000)
    with pytest.raises(ConfigError, match=r"those with a sliding window .*, or lower scheduler.max_step"):
        check_local_room(least - 1, needed, 0, context * 1000)
    geometry = plan_blocks(budget_bytes=least + 16_000, bytes_per_token=1000, block_size=16)
    assert tokens_within(geometry, shape) >= min(context, needed // 1000)


def test_states_of_a_sequence_must_fit_beside_its_blocks() -> None:
    states = StateGroup((1,), (), cells=5)
    layout = KVLayout(16, 16_000, (KVGroup((0,), 0, 1),), states)
    shape = LocalShape(state=5)
    assert local_bytes(shape, layout, 100) == local_bytes(shape, layout, 100_000) == 3 * 5 * 16_000
    check_local_room(2 * 15 * 16_000, 0, 15 * 16_000, 1000 * 1000)
    with pytest.raises(ConfigError, match=r"those that carry a state .* raise resources.kv_cache_max_memory_mb$"):
        check_local_room(2 * 15 * 16_000 - 1, 0, 15 * 16_000, 1000 * 1000)
    assert tokens_within(BlockGeometry(20, 16), shape) == 5 * 16
    assert tokens_within(BlockGeometry(14, 16), shape) == 0


# --- the K/V budget ---


def test_a_share_of_what_the_container_leaves_beside_the_weights(caplog: pytest.LogCaptureFixture) -> None:
    assert budget(HOST, CONTAINER) == 400 * MIB
    assert caplog.messages == [
        "KV cache: 400 MiB (0.25 of the 2,000 MiB that the container's memory limit of 2,048 MiB leaves, "
        "less 400 MiB of weights)"
    ]


def test_a_limit_of_weights_and_cache_together_is_one_more_hard_limit() -> None:
    assert budget(HOST, CONTAINER, max_memory_mb=600.0) == 50 * MIB  # a quarter of what 400 MiB of weights leave
    assert budget(HOST, max_memory_mb=600.0, kv_cache_max_memory_mb=200.0) == 200 * MIB
    with pytest.raises(
        ConfigError, match=r"resources.max_memory_mb of 600 MiB has 200 MiB left .*; set it to at most 200"
    ):
        budget(HOST, max_memory_mb=600.0, kv_cache_max_memory_mb=201.0)
    with pytest.raises(ModelError, match=r"more than the 300 MiB that resources.max_memory_mb"):
        budget(HOST, max_memory_mb=300.0)


def test_on_the_whole_machine_its_free_memory_counts(caplog: pytest.LogCaptureFixture) -> None:
    assert budget(HOST, kv_memory_fraction=0.5) == 19_800 * MIB
    assert "(0.5 of the 40,000 MiB that the machine's memory of 64,000 MiB leaves" in caplog.text


def test_mapped_weights_are_left_room_too() -> None:
    assert budget(HOST, CONTAINER, weights=MAPPED) == 400 * MIB


def test_weights_that_do_not_fit_a_hard_limit_are_refused_with_the_numbers() -> None:
    with pytest.raises(ModelError) as caught:
        budget(HOST, CONTAINER, weights=Weights("big.gguf", 3000 * MIB))
    assert str(caught.value) == (
        "the weights of big.gguf take 3,000 MiB, more than the 2,000 MiB that the container's memory limit of "
        "2,048 MiB leaves; raise the limit or use a smaller model"
    )


def test_the_tightest_hard_limit_is_named_even_where_the_machine_has_less() -> None:
    short = MemoryLimit("the machine's memory", 64_000 * MIB, 100 * MIB, hard=False)
    with pytest.raises(ModelError, match="the container's memory limit"):
        budget(short, CONTAINER, weights=Weights("big.gguf", 3000 * MIB))


def test_mapped_weights_may_be_larger_than_the_limit_but_a_budget_must_be_set(caplog: pytest.LogCaptureFixture) -> None:
    big = Weights("big.gguf", 3000 * MIB, mapped=True)
    with pytest.raises(ConfigError, match=r"leaves nothing for the KV cache.*kv_cache_max_memory_mb"):
        budget(HOST, CONTAINER, weights=big)
    assert budget(HOST, CONTAINER, weights=big, kv_cache_max_memory_mb=100.0) == 100 * MIB
    assert "expect it to be slow" in caplog.text


def test_a_machine_that_is_short_of_memory_is_warned_of_and_not_refused(caplog: pytest.LogCaptureFixture) -> None:
    assert budget(HOST, kv_cache_max_memory_mb=50_000.0) == 50_000 * MIB
    assert levels(caplog) == ["INFO", "WARNING"]
    assert caplog.messages[1] == (
        "resources.kv_cache_max_memory_mb is 50000 and the weights take 400 MiB, together more than "
        "the 40,000 MiB that the machine's memory of 64,000 MiB leaves"
    )


@pytest.mark.parametrize("weights", [WEIGHTS, MAPPED])
def test_a_budget_that_a_hard_limit_cannot_give_is_refused(weights: Weights) -> None:
    with pytest.raises(ConfigError) as caught:
        budget(HOST, CONTAINER, weights=weights, kv_cache_max_memory_mb=2500.0)
    most = 2000 if weights.mapped else 1600
    assert "\n" not in str(caught.value)
    assert str(caught.value) == (
        "resources.kv_cache_max_memory_mb is 2500, but the container's memory limit of 2,048 MiB has "
        f"{most:,} MiB left after the weights ({2000 - most} MiB); set it to at most {most}, or raise the limit"
    )


@pytest.mark.parametrize(("asked", "warnings"), [(1400.0, 0), (1500.0, 1), (1600.0, 1)])
def test_a_budget_that_takes_nearly_all_of_a_hard_limit_is_warned_of(
    asked: float, warnings: int, caplog: pytest.LogCaptureFixture
) -> None:
    assert budget(HOST, CONTAINER, kv_cache_max_memory_mb=asked) == int(asked) * MIB
    assert levels(caplog).count("WARNING") == warnings
    assert caplog.messages[0] == f"KV cache: {asked:,.0f} MiB (resources.kv_cache_max_memory_mb)"


def test_the_warning_names_the_limit_that_is_nearly_used_up(caplog: pytest.LogCaptureFixture) -> None:
    short = MemoryLimit("the machine's memory", 64_000 * MIB, 1980 * MIB, hard=False)
    budget(short, CONTAINER, kv_cache_max_memory_mb=1500.0)
    assert caplog.messages[1].startswith(
        "resources.kv_cache_max_memory_mb is 1500: with the weights, that leaves hardly"
    )
    assert "the container's memory limit" in caplog.messages[1] and "the machine" not in caplog.messages[1]


def test_mapped_weights_count_where_mappings_do() -> None:
    """The address space holds them, whether or not they are in memory."""
    with pytest.raises(ConfigError) as caught:
        budget(HOST, CONTAINER, ADDRESSES, weights=MAPPED, kv_cache_max_memory_mb=1700.0)
    left = "ulimit -v of 2,148 MiB has 1,648 MiB left after the weights (400 MiB); set it to at most 1648"
    assert left in str(caught.value)
    assert budget(HOST, CONTAINER, ADDRESSES, weights=MAPPED, kv_cache_max_memory_mb=1400.0) == 1400 * MIB
    with pytest.raises(ModelError, match=r"more than the 2,048 MiB that ulimit -v"):
        budget(HOST, ADDRESSES, weights=Weights("big.gguf", 3000 * MIB, mapped=True), kv_cache_max_memory_mb=1.0)


@pytest.mark.parametrize(("room", "warnings"), [(HOST, 0), (CONTAINER, 1)])
def test_so_is_a_share_that_does(room: MemoryLimit, warnings: int, caplog: pytest.LogCaptureFixture) -> None:
    budget(room, kv_memory_fraction=1.0)
    assert levels(caplog).count("WARNING") == warnings


# --- threads ---


def test_the_log_says_what_decided_the_threads(caplog: pytest.LogCaptureFixture) -> None:
    assert choose_threads(None, Cpus(64, 64, 64, 2.0)) == 2
    assert choose_threads(8, Cpus(64, 64, 64)) == 8
    assert caplog.messages == [
        "threads: 2 (cgroup quota of 2 CPUs; the machine has 64)",
        "threads: 8 (backend.threads)",
    ]


def test_more_threads_than_cpus_stay_in_the_users_hand_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert choose_threads(8, Cpus(64, 64, 64, 1.5)) == 8
    assert levels(caplog) == ["INFO", "WARNING"]
    assert "backend.threads is 8" in caplog.messages[1] and "cgroup quota of 1.5 CPUs" in caplog.messages[1]


# --- the size of packed weights ---


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("weight_type", WEIGHT_TYPES)
def test_the_size_of_packed_weights_is_known_from_the_header(weight_type: str, tied: bool, tmp_path: Path) -> None:
    pytest.importorskip("cllm._native")
    from cllm.backends.native.loader import load_engine
    from cllm.backends.native.sizes import packed_bytes

    file = write_model(tmp_path / "m.gguf", weight_type=weight_type, tied=tied, n_embd=256, n_ff=512, n_vocab=327)
    model = GGUFModel.open(file)
    assert packed_bytes(model) == load_engine(model, threads=1).weight_bytes


# --- all of it ---


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    pytest.importorskip("cllm._native")
    return write_model(tmp_path / "tiny.gguf", weight_type="q8_0")


def test_a_model_gets_what_the_container_has(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(open_model, "read_memory_limits", lambda: [HOST, CONTAINER])
    monkeypatch.setattr(open_model, "read_cpus", lambda: Cpus(64, 64, 64, 1.5))
    with parts_of(tiny).backend as backend:
        assert 490 * MIB < backend.kv_bytes <= 500 * MIB
        assert "1 thread" in backend.describe()
    assert "threads: 1 (cgroup quota of 1.5 CPUs; the machine has 64)" in caplog.messages
    assert any(line.startswith("KV cache: 500 MiB (0.25 of the 2,000 MiB") for line in caplog.messages)


def test_what_does_not_fit_is_known_before_it_is_loaded(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> None:
        raise AssertionError("loaded")

    monkeypatch.setattr(open_model, "_open_native", never)
    small = MemoryLimit("the container's memory limit", 64 * 1024, 64 * 1024, hard=True)
    monkeypatch.setattr(open_model, "read_memory_limits", lambda: [HOST, small])
    with pytest.raises(ModelError, match=r"the weights of tiny\.gguf take"):
        parts_of(tiny)
    monkeypatch.setattr(open_model, "read_memory_limits", lambda: [HOST, CONTAINER])
    with pytest.raises(ConfigError, match=r"resources\.kv_cache_max_memory_mb is 5000, but"):
        parts_of(tiny, resources__kv_cache_max_memory_mb=5000)


def test_an_arena_that_the_system_does_not_give_is_one_line(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_model, "read_memory_limits", lambda: [HOST])
    with pytest.raises(ConfigError, match=r"not enough address space.*lower resources.kv_cache_max_memory_mb"):
        parts_of(tiny, resources__kv_cache_max_memory_mb=2e8, resources__block_size=1024)


def test_memory_that_a_step_does_not_get_is_that_steps_failure(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine then computes each sequence alone, which needs less."""
    from cllm.backends.native import NativeBackend

    chunks = [Chunk(array("i", [1, 2]), 0, True, blocks=[block]) for block in range(2)]
    with parts_of(tiny, resources__kv_cache_max_memory_mb=8).backend as backend:
        with monkeypatch.context() as patched:

            def refuse(self: NativeBackend, rows: int) -> None:
                raise MemoryError("Unable to allocate")

            patched.setattr(NativeBackend, "_room_for_logits", refuse)
            with pytest.raises(BackendError, match="Unable to allocate") as caught:
                rows_of(backend, chunks)
            assert not caught.value.fatal
            assert len(rows_of(backend, chunks[:1])) == 1
        assert len(rows_of(backend, chunks)) == 2


def test_under_a_ulimit_a_server_starts_smaller(tiny: Path) -> None:
    """For real: the address space is limited, and the cache is a quarter of what is left."""
    code = (
        "import logging, sys; logging.basicConfig(level=logging.INFO, format='%(message)s', stream=sys.stdout)\n"
        "from pathlib import Path; from loading_kit import parts_of\n"
        "print(parts_of(Path(sys.argv[1])).backend.kv_bytes)"
    )
    limit = 4096 * MIB
    ran = subprocess.run(
        [sys.executable, "-c", code, str(tiny)],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1])),
        cwd=KITS,
        capture_output=True,
        text=True,
        check=True,
    )
    *lines, size = ran.stdout.splitlines()
    assert 64 * MIB < int(size) <= limit // 4
    assert any("that ulimit -v of 4,096 MiB leaves" in line for line in lines), lines


def test_the_default_is_what_this_machine_allows(tiny: Path) -> None:
    with parts_of(tiny, resources__kv_cache_max_memory_mb=8).backend as backend:
        count = default_threads(read_cpus()).count
        assert ("1 thread" if count == 1 else f"{count} threads") in backend.describe()
