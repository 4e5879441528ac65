"""K/V on disk: names, the format, what is found again, what goes first, and who shares a directory."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import threading
import zlib
from array import array
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from cllm.kv.block_names import chain, fingerprint, root_name
from cllm.kv.disk.format import PAGE, VERSION
from cllm.kv.disk.store import DiskStore
from disk_kit import (
    BLOCK_BYTES,
    BLOCK_TOKENS,
    MODEL,
    content,
    load,
    long_prompt,
    make_store,
    names_of,
    open_model_store,
    put,
    segments,
    total_bytes,
)
from repository import KITS

# -- names ---------------------------------------------------------------------------------------------------------


def test_a_name_depends_on_the_space_and_every_token_before() -> None:
    tokens = array("i", range(64))
    names = chain(root_name(), tokens, 16)
    assert len(set(names)) == 4
    for changed in range(64):
        other = tokens[:]
        other[changed] += 1
        others = chain(root_name(), other, 16)
        equal = [name == other_name for name, other_name in zip(names, others, strict=True)]
        assert equal == [number < changed // 16 for number in range(4)]
    assert not set(names) & set(chain(root_name(b"tenant"), tokens, 16))
    assert not set(names) & set(chain(root_name(b"tenant", names[0]), tokens, 16))


def test_a_chain_can_be_continued() -> None:
    tokens = np.arange(100, dtype=np.int32)
    root = root_name()
    whole = chain(root, tokens, 16)
    assert len(whole) == 6
    begun = chain(root, tokens[:48], 16)
    assert begun + chain(begun[-1], tokens[48:], 16) == whole
    assert chain(root, tokens[:50], 16) == whole[:3]
    assert chain(root, array("i", tokens.tolist()), 16) == chain(root, tokens.tobytes(), 16) == whole


def test_every_setting_is_in_the_fingerprint() -> None:
    settings: dict[str, str | int] = {"kv_type_k": "f16", "kv_type_v": "f16", "block_size": 16, "engine": "0.1.0"}
    prints = {fingerprint(b"content", settings), fingerprint(b"other content", settings)}
    for key in settings:
        prints.add(fingerprint(b"content", {**settings, key: "other"}))
    assert len(prints) == 2 + len(settings)
    assert fingerprint(b"content", dict(reversed(settings.items()))) in prints


# -- what is found again -------------------------------------------------------------------------------------------


def test_what_was_put_is_loaded_after_a_restart(tmp_path: Path) -> None:
    store = make_store(tmp_path / "kv")
    model_store = open_model_store(store)
    names = names_of(model_store, long_prompt(20))
    assert put(model_store, names) == 20
    assert model_store.held(names) == 0, "not before it is written"
    store.work()
    assert model_store.held(names) == 20
    assert load(store, model_store, names) == 20
    store.close()

    again = make_store(tmp_path / "kv")
    model_store = open_model_store(again)
    assert model_store.held(names) == 20
    assert load(again, model_store, names[5:15]) == 10
    assert model_store.held(names_of(model_store, long_prompt(3, start=1))) == 0
    assert not again.stats().counts["foreign"]


def test_a_chain_that_grows_stays_in_one_file(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    model_store = open_model_store(store)
    names = names_of(model_store, long_prompt(12))
    for end in (3, 4, 9, 12):
        put(model_store, names[:end])
        store.work()
    assert len(segments(tmp_path)) == 1
    assert load(store, model_store, names) == 12
    store.close()
    again = make_store(tmp_path)
    model_store = open_model_store(again)
    more = names_of(model_store, long_prompt(14))
    put(model_store, more)
    again.work()
    assert len(segments(tmp_path)) == 1, "a file is appended to after a restart, too"
    assert load(again, model_store, more) == 14


def test_blocks_may_come_one_by_one_and_backwards(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    model_store = open_model_store(store)
    names = names_of(model_store, long_prompt(10))
    for number in reversed(range(10)):
        parent = names[number - 1] if number else root_name()
        assert model_store.put(parent, number, [names[number]], [content(names[number])]) == 1
    store.work()
    assert len(segments(tmp_path)) == 1
    assert load(store, model_store, names) == 10


def test_a_branch_has_a_file_of_its_own_and_shares_the_rest(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    model_store = open_model_store(store)
    trunk = names_of(model_store, long_prompt(8))
    branch = names_of(model_store, long_prompt(4) + [7] * 16)
    put(model_store, trunk)
    store.work()
    before = total_bytes(tmp_path)
    put(model_store, branch)
    store.work()
    assert len(segments(tmp_path)) == 2
    assert total_bytes(tmp_path) - before == PAGE + PAGE + PAGE  # headers, and four blocks of 600 bytes
    assert load(store, model_store, branch) == load(store, model_store, trunk) == 8


def test_what_is_there_is_not_written_again(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    model_store = open_model_store(store)
    names = names_of(model_store, long_prompt(6))
    for _ in range(3):
        assert put(model_store, names) == 6
    store.work()
    written = store.writer.speed.total
    assert put(model_store, names) == 6
    store.work()
    assert store.writer.speed.total == written


def test_a_block_of_another_size_is_refused(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    model_store = open_model_store(store)
    names = names_of(model_store, long_prompt(1))
    with pytest.raises(ValueError, match="599 bytes, not 600"):
        model_store.put(root_name(), 0, names, [bytes(599)])
    assert store.writer.queued_bytes == 0


def test_memory_for_copies_is_used_again_and_goes_back(tmp_path: Path) -> None:
    now = [0.0]
    store = make_store(tmp_path, queue_bytes=8 * BLOCK_BYTES, monotonic=lambda: now[0])
    model_store = open_model_store(store)
    for number in range(3):
        put(model_store, names_of(model_store, long_prompt(8, start=1000 * number)))
        store.work()
        assert store.staging.kept == 8 * BLOCK_BYTES
    now[0] += 10
    store.work()
    assert store.staging.kept == 0


def test_without_memory_for_copies_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = make_store(tmp_path)
    model_store = open_model_store(store)
    names = names_of(model_store, long_prompt(4))

    def no_memory(*_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(store.staging, "copies", no_memory)
        assert put(model_store, names) == 0
    assert store.writer.queued_bytes == 0
    assert put(model_store, names) == 4
    store.work()
    assert load(store, model_store, names) == 4


def test_models_and_tenants_do_not_see_each_other(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    model_store = open_model_store(store)
    other = open_model_store(store, fingerprint(b"another model's files", {}))
    names = names_of(model_store, long_prompt(4))
    put(model_store, names)
    store.work()
    assert other.held(names) == 0
    tenant = chain(root_name(b"a tenant"), array("i", long_prompt(4)), BLOCK_TOKENS)
    assert model_store.held(tenant) == 0


def test_models_that_write_blocks_of_one_name_at_once_do_not_mix_them(tmp_path: Path) -> None:
    """Names do not depend on the model: what one of them writes must not be joined to what the other has begun."""
    store = make_store(tmp_path)
    ours, other = open_model_store(store), open_model_store(store, fingerprint(b"another model's files", {}))
    names = names_of(ours, long_prompt(4))
    ours.put(root_name(), 0, names[:2], [content(name) for name in names[:2]])
    assert put(ours, names[:3], 2) == 1
    other.put(names[1], 2, names[2:], [content(name)[::-1] for name in names[2:]])
    store.work()
    assert (ours.held(names), other.held(names), other.held(names[2:])) == (3, 0, 2)
    assert load(store, ours, names[:3]) == 3
    buffers = [np.zeros(BLOCK_BYTES, np.uint8) for _ in names[2:]]
    ticket = other.load(names[2:], buffers)
    store.work()
    assert ticket.complete
    assert [buffer.tobytes() for buffer in buffers] == [content(name)[::-1] for name in names[2:]]


def change_version(path: Path, version: int) -> None:
    page = bytearray(path.read_bytes()[: PAGE - 4])
    page[8:12] = version.to_bytes(4, "little")
    with path.open("r+b") as file:
        file.write(page + zlib.crc32(page).to_bytes(4, "little"))


def test_what_an_older_version_wrote_is_removed_and_a_newer_versions_left_alone(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    ours, gone = open_model_store(store), open_model_store(store, fingerprint(b"a model that is not used any more", {}))
    prompts = [long_prompt(4, start) for start in (0, 100, 200)]
    for prompt in prompts:
        put(ours, names_of(ours, prompt))
        store.work()
    put(gone, names_of(gone, prompts[0]))
    store.work()
    store.close()
    (gone_folder,) = {path.parent for path in segments(tmp_path)} - {tmp_path / MODEL[:16].hex()}
    old, new, same = sorted((tmp_path / MODEL[:16].hex()).iterdir())
    change_version(old, VERSION - 1)
    change_version(new, VERSION + 1)
    change_version(next(gone_folder.iterdir()), VERSION - 1)

    store = make_store(tmp_path)
    ours = open_model_store(store)
    assert segments(tmp_path) == [new, same] and not gone_folder.exists()
    assert sorted(ours.held(names_of(ours, prompt)) for prompt in prompts) == [0, 0, 4]
    assert store.stats().counts["outdated"] == 2
    for prompt in prompts:
        assert put(ours, names_of(ours, prompt)) == 4
    store.work()
    assert [load(store, ours, names_of(ours, prompt)) for prompt in prompts] == [4, 4, 4]


# -- the limit -----------------------------------------------------------------------------------------------------


def test_the_queue_is_bounded(tmp_path: Path) -> None:
    store = make_store(tmp_path, queue_bytes=10 * BLOCK_BYTES)
    model_store = open_model_store(store)
    names = names_of(model_store, long_prompt(25))
    assert put(model_store, names) == 10
    assert put(model_store, names) == 10
    assert store.writer.queued_bytes == 10 * BLOCK_BYTES
    store.work()
    assert put(model_store, names) == 20
    store.work()
    assert put(model_store, names) == 25
    store.work()
    assert load(store, model_store, names) == 25


def test_the_limit_holds_and_what_was_used_longest_ago_goes_first(tmp_path: Path) -> None:
    limit = 120_000
    store = make_store(tmp_path, limit=limit)
    model_store = open_model_store(store)
    chains = [names_of(model_store, long_prompt(20, start=1000 * number)) for number in range(12)]
    for number, names in enumerate(chains):
        put(model_store, names)
        store.work()
        assert load(store, model_store, chains[0]) == 20, "it is used all the time"
        assert total_bytes(tmp_path) <= limit
        assert model_store.held(names) == 20, f"chain {number} was just written"
    assert model_store.held(chains[1]) == 0
    assert store.stats().counts["evicted_bytes"] > 0


def test_a_chain_goes_from_its_end(tmp_path: Path) -> None:
    """What others share of it stays, and nothing is written again for that."""
    store = make_store(tmp_path, limit=150_000)
    model_store = open_model_store(store)
    names = names_of(model_store, long_prompt(160))
    put(model_store, names)
    store.work()
    assert load(store, model_store, names[:10]) == 10
    for number in range(1, 9):
        put(model_store, names_of(model_store, long_prompt(40, start=1000 * number)))
        store.work()
        load(store, model_store, names[:10])
    held = model_store.held(names)
    assert 10 <= held < 160
    assert load(store, model_store, names[:held]) == held
    store.close()
    again = make_store(tmp_path, limit=150_000)
    model_store = open_model_store(again)
    assert model_store.held(names) == held
    assert again.stats().counts.get("torn", 0) == 0, "a file that was cut is no damage"
    put(model_store, names)
    again.work()
    assert total_bytes(tmp_path) <= 150_000


def test_a_chain_that_is_larger_than_the_limit_keeps_its_beginning(tmp_path: Path) -> None:
    store = make_store(tmp_path, limit=400_000)
    model_store = open_model_store(store)
    names = names_of(model_store, long_prompt(1000))
    put(model_store, names)
    store.work()
    held = model_store.held(names)
    assert 400 < held < 650
    assert total_bytes(tmp_path) <= 400_000
    assert load(store, model_store, names[:held]) == held
    assert store.stats().counts["unwritten_bytes"] > 0


def test_the_limit_may_be_smaller_than_a_block(tmp_path: Path) -> None:
    store = make_store(tmp_path, limit=100)
    model_store = open_model_store(store)
    put(model_store, names_of(model_store, long_prompt(3)))
    store.work()
    assert total_bytes(tmp_path) == 0


def test_other_models_make_room_too(tmp_path: Path) -> None:
    limit = 100_000
    old = make_store(tmp_path, limit=limit)
    model_store = open_model_store(old, fingerprint(b"another model's files", {}))
    put(model_store, names_of(model_store, long_prompt(100)))
    old.work()
    old.close()
    store = make_store(tmp_path, limit=limit)
    model_store = open_model_store(store)
    names = names_of(model_store, long_prompt(100))
    put(model_store, names)
    store.work()
    assert model_store.held(names) == 100
    assert total_bytes(tmp_path) <= limit


@pytest.mark.parametrize("step_ns", [-(10**12), 0, 10**6])
def test_the_order_does_not_depend_on_the_clock(tmp_path: Path, step_ns: int) -> None:
    now = [10**18]

    def clock() -> int:
        now[0] += step_ns
        return now[0]

    store = make_store(tmp_path, limit=90_000, clock_ns=clock)
    model_store = open_model_store(store)
    chains = [names_of(model_store, long_prompt(20, start=1000 * number)) for number in range(8)]
    for names in chains:
        put(model_store, names)
        store.work()
        load(store, model_store, chains[0])
    store.close()
    store = make_store(tmp_path, limit=90_000, clock_ns=clock)
    model_store = open_model_store(store)
    put(model_store, names_of(model_store, long_prompt(60, start=50_000)))
    store.work()
    assert model_store.held(chains[0]) == 20
    assert model_store.held(chains[1]) == model_store.held(chains[2]) == 0


# -- several processes ---------------------------------------------------------------------------------------------


def test_two_stores_see_what_the_other_wrote(tmp_path: Path) -> None:
    now = [0.0]
    one, two = (make_store(tmp_path, monotonic=lambda: now[0]) for _ in range(2))
    first, second = open_model_store(one), open_model_store(two)
    names = names_of(first, long_prompt(10))
    put(first, names[:6])
    one.work()
    assert second.held(names) == 0
    now[0] += 3
    second.held(names)
    two.work()
    assert second.held(names) == 6
    assert load(two, second, names[:6]) == 6
    put(second, names)
    two.work()
    assert len(segments(tmp_path)) == 1, "both append to it, one after the other"
    now[0] += 3
    first.held(names)
    one.work()
    assert load(one, first, names) == 10


def test_what_another_process_removes_or_cuts_is_not_used(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    model_store = open_model_store(store)
    chains = [names_of(model_store, long_prompt(10, start=1000 * number)) for number in range(2)]
    for names in chains:
        put(model_store, names)
        store.work()
    by_age = sorted(segments(tmp_path), key=lambda path: path.stat().st_mtime_ns)
    by_age[0].unlink()
    os.truncate(by_age[1], by_age[1].stat().st_size - PAGE)
    assert load(store, model_store, chains[0]) == 0
    assert model_store.held(chains[0]) == 0
    few = load(store, model_store, chains[1])
    assert 0 < few < 10
    assert model_store.held(chains[1]) == few
    assert store.stats().counts["vanished"] == 1
    assert store.stats().counts.get("damaged", 0) == 0


def test_a_file_that_is_being_written_to_is_left_alone(tmp_path: Path) -> None:
    """Another process has given it its new length, and not yet written there."""
    import fcntl

    store = make_store(tmp_path)
    model_store = open_model_store(store)
    names = names_of(model_store, long_prompt(10))
    put(model_store, names[:6])
    store.work()
    (path,) = segments(tmp_path)
    size = path.stat().st_size
    with path.open("r+b") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        os.truncate(path, size + 5 * PAGE)
        other = make_store(tmp_path)
        seen = open_model_store(other)
        assert load(other, seen, names[:6]) == 6, "what is whole of it can be used"
        assert path.stat().st_size == size + 5 * PAGE
        put(model_store, names)
        store.work()
        assert len(segments(tmp_path)) == 2, "the one that is being written to cannot be appended to"
    again = make_store(tmp_path)
    model_store = open_model_store(again)
    assert again.stats().counts["torn"] == 1
    assert path.stat().st_size == size
    assert load(again, model_store, names) == 10


WRITER = """
import sys
from pathlib import Path
from disk_kit import *
store = make_store(Path(sys.argv[1]), limit=int(sys.argv[2]))
model_store = open_model_store(store)
for number in range(40):
    names = names_of(model_store, long_prompt(6 + number % 9, start=int(sys.argv[3]) * 100_000 + 1000 * number))
    put(model_store, names)
    store.work()
    load(store, model_store, names)
"""


def test_the_limit_holds_over_several_processes(tmp_path: Path) -> None:
    limit = 150_000
    environment = {**os.environ, "PYTHONPATH": str(KITS)}
    processes = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path), str(limit), str(number)], env=environment)
        for number in range(3)
    ]
    largest = 0
    while any(process.poll() is None for process in processes):
        with suppress(FileNotFoundError):  # something was evicted meanwhile
            largest = max(largest, total_bytes(tmp_path))
    assert [process.returncode for process in processes] == [0, 0, 0]
    # Files that were measured at different moments may not have been there together.
    assert total_bytes(tmp_path) <= limit
    assert 0.5 * limit < largest
    store = make_store(tmp_path, limit=limit)
    model_store = open_model_store(store)
    counts = store.stats().counts
    assert not counts.get("damaged") and not counts.get("torn")
    held = 0
    for number in range(3):
        for turn in range(40):
            names = names_of(model_store, long_prompt(6 + turn % 9, start=number * 100_000 + 1000 * turn))
            held += load(store, model_store, names[: model_store.held(names)]) if model_store.held(names) else 0
    assert held > 50


def test_the_directory_may_be_removed_while_it_is_used(tmp_path: Path) -> None:
    store = make_store(tmp_path / "kv")
    model_store = open_model_store(store)
    names = names_of(model_store, long_prompt(10))
    put(model_store, names)
    store.work()
    shutil.rmtree(tmp_path / "kv")
    assert load(store, model_store, names) == 0
    put(model_store, names)
    store.work()
    assert load(store, model_store, names) == 10


def test_another_process_that_holds_the_directory_for_ever_costs_what_was_to_be_written(tmp_path: Path) -> None:
    import fcntl

    now = [0.0]
    store = make_store(tmp_path, monotonic=lambda: now.__setitem__(0, now[0] + 0.1) or now[0])
    model_store = open_model_store(store)
    names = names_of(model_store, long_prompt(10))
    put(model_store, names[:5])
    store.work()
    with (tmp_path / "lock").open("r+b") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        put(model_store, names)
        store.work()
        assert load(store, model_store, names[:5]) == 5, "reading goes on"
        assert store.stats().trouble is None
    assert model_store.held(names) == 5
    put(model_store, names)
    store.work()
    assert load(store, model_store, names) == 10


# -- privacy, foreign files ----------------------------------------------------------------------------------------


def test_files_are_private(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        store = make_store(tmp_path / "kv")
        model_store = open_model_store(store)
        put(model_store, names_of(model_store, long_prompt(3)))
        store.work()
    finally:
        os.umask(old)
    for path in [tmp_path / "kv", *(tmp_path / "kv").rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def test_what_is_not_ours_is_counted_and_left(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_bytes(b"precious")
    kv = tmp_path / "kv"
    store = make_store(kv, limit=60_000)
    model_store = open_model_store(store)
    names = names_of(model_store, long_prompt(10))
    put(model_store, names)
    store.work()
    (path,) = segments(kv)
    (kv / "notes.txt").write_bytes(b"mine" * 50_000)
    (path.parent / "other.kv").write_bytes(b"mine")
    link = path.parent / f"{'0' * 32}.kv"
    link.symlink_to(outside)
    again = make_store(kv, limit=60_000)
    model_store = open_model_store(again)
    assert again.stats().counts["foreign"] == 3
    assert load(again, model_store, names) == 10
    for number in range(1, 10):
        put(model_store, names_of(model_store, long_prompt(20, start=1000 * number)))
        again.work()
    assert outside.read_bytes() == b"precious" and link.is_symlink()
    assert (kv / "notes.txt").exists() and (path.parent / "other.kv").exists()


def test_a_file_by_our_name_that_is_none_of_ours_is_removed(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    model_store = open_model_store(store)
    names = names_of(model_store, long_prompt(10))
    put(model_store, names)
    store.work()
    (path,) = segments(tmp_path)
    other = path.with_name(f"{'ab' * 16}.kv")
    other.write_bytes(b"something else" * 1000)
    copy = path.with_name(f"{'cd' * 16}.kv")
    copy.write_bytes(path.read_bytes())
    begun = path.with_name(f"{'ef' * 16}.kv")
    begun.write_bytes(bytes(3 * PAGE))
    again = make_store(tmp_path)
    model_store = open_model_store(again)
    counts = again.stats().counts
    assert (counts["damaged"], counts["misplaced"], counts["torn"]) == (1, 1, 1)
    assert segments(tmp_path) == [path]
    assert load(again, model_store, names) == 10


# -- threads -------------------------------------------------------------------------------------------------------


def test_with_threads_loading_calls_back(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, limit=1 << 20, linger_s=0.0)
    model_store = store.open_model(MODEL, block_tokens=BLOCK_TOKENS, block_bytes=BLOCK_BYTES, about={})
    assert model_store.ready(10)
    names = names_of(model_store, long_prompt(10))
    assert put(model_store, names) == 10
    assert store.flush(10)
    told = threading.Event()
    buffers = np.zeros((10, BLOCK_BYTES), np.uint8)
    ticket = model_store.load(names, list(buffers), lambda _: told.set())
    assert told.wait(10) and ticket.complete
    assert [row.tobytes() for row in buffers] == [content(name) for name in names]
    assert store.load_seconds(1 << 20) > 0
    store.close()
    late = model_store.load(names, list(buffers))
    assert late.wait(10) and late.loaded == 0 and late.error == "the store was closed"
    assert put(model_store, names_of(model_store, long_prompt(10, start=1000))) == 0


def test_a_cancelled_ticket_ends(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    model_store = open_model_store(store)
    names = names_of(model_store, long_prompt(4))
    put(model_store, names)
    store.work()
    ticket = model_store.load(names, [np.zeros(BLOCK_BYTES, np.uint8) for _ in names])
    ticket.cancel()
    store.work()
    assert ticket.done and not ticket.complete and ticket.loaded == 0
    assert store.reader.queued_bytes == 0


# -- whole sequences -----------------------------------------------------------------------------------------------


def save(store: DiskStore, model_store: object, tokens: list[int], size: int = 5000) -> bytes:
    payload = content(array("i", tokens).tobytes(), size)
    assert model_store.put_sequence(names_of(model_store, tokens), array("i", tokens).tobytes(), payload)  # type: ignore[attr-defined,arg-type]
    store.work()
    return payload


def test_a_saved_sequence_is_found_by_what_it_has_in_common(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    model_store = open_model_store(store)
    tokens = list(range(50))  # twelve blocks and two tokens
    payload = save(store, model_store, tokens, size=(2 << 20) // 10)
    store.close()
    store = make_store(tmp_path)
    model_store = open_model_store(store)

    def find(prompt: list[int]) -> int:
        found = model_store.find_sequence(names_of(model_store, prompt), array("i", prompt).tobytes())
        return 0 if found is None else found.matched

    assert find([*tokens, 7, 8]) == 50, "all of it, whatever follows"
    assert find(tokens[:49]) == 48
    assert find([*tokens[:30], 0, 0, 0, 0, 0]) == 28, "in whole blocks"
    assert find([1, *tokens]) == 0
    found = model_store.find_sequence(names_of(model_store, tokens), array("i", tokens).tobytes())
    assert found is not None and (found.tokens, found.nbytes) == (50, len(payload))
    buffer = np.zeros(found.nbytes, np.uint8)
    ticket = model_store.load_sequence(found, buffer)
    store.work()
    assert ticket.complete and buffer.tobytes() == payload


def test_a_longer_sequence_takes_the_place_of_its_prefix(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    model_store = open_model_store(store)
    save(store, model_store, list(range(30)))
    save(store, model_store, [*range(20), 7, 7, 7, 7])
    assert len(segments(tmp_path)) == 2
    save(store, model_store, list(range(45)))
    assert len(segments(tmp_path)) == 2, "the first is part of the third, the second is not"
    found = model_store.find_sequence(names_of(model_store, list(range(30))), array("i", range(30)).tobytes())
    assert found is not None and (found.matched, found.tokens) == (28, 45)


def test_sequences_go_by_age(tmp_path: Path) -> None:
    store = make_store(tmp_path, limit=100_000)
    model_store = open_model_store(store)
    for number in range(20):
        save(store, model_store, [number] * 20, size=15_000)
        assert total_bytes(tmp_path) <= 100_000
    held = [
        model_store.find_sequence(names_of(model_store, [number] * 20), array("i", [number] * 20).tobytes()) is not None
        for number in range(20)
    ]
    assert held == [False] * (20 - sum(held)) + [True] * sum(held)
    assert sum(held) >= 3
