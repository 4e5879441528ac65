"""Compiling structures: what is kept and for whom, who waits for whom, and what becomes of those who leave."""

from __future__ import annotations

import asyncio
import gc
import json
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

import pytest

from cllm.errors import InvalidRequestError, OverloadedError, RequestCancelledError, ShuttingDownError
from cllm.structured import building
from cllm.structured.building import Built
from cllm.structured.compiler import Compiler
from cllm.structured.effort import NotSmallError
from cllm.structured.grammar_cache import GROWTH_PER_TOKEN, GrammarCache
from cllm.structured.matcher import Grammar
from cllm.structured.structure import Structure
from cllm.work.turns import OWNER, Owner
from cllm.work.worker import ExceededError
from structured_kit import build, builder, by_schema, make_compiler

WORD = Structure("regex", "[a-z]+")
LARGE = by_schema({"type": "integer", "multipleOf": 4999})


async def test_what_was_compiled_is_kept() -> None:
    compiler = make_compiler()
    structures = [Structure("regex", f"x{number}") for number in range(40)]
    first = [await compiler.compile(each) for each in structures]
    assert [await compiler.compile(each) for each in structures] == first
    assert await compiler.compile(Structure("regex", "x7", param="another")) is first[7]
    compiler.close()


def kept(cache: GrammarCache, number: int) -> bool:
    return cache.get(number) is not None


def test_kept_grammars_have_a_limit_on_their_bytes_and_the_most_recent_ones_stay() -> None:
    cache = GrammarCache(1000)
    for number in range(5):
        cache.put(number, Built(build(WORD), 300))
    assert [kept(cache, number) for number in range(5)] == [False, False, True, True, True] and cache.size == 900
    assert kept(cache, 2)
    cache.put(5, Built(build(WORD), 300))
    assert [kept(cache, number) for number in (2, 3, 4, 5)] == [True, False, True, True]


def test_what_answers_follow_counts_until_they_end() -> None:
    cache = GrammarCache(1000)
    cache.put("used", Built(build(WORD), 900))
    grammar = cache.get("used")
    assert grammar is not None
    matcher = grammar.start()
    del grammar
    assert not cache.make_room(500) and not kept(cache, "used"), cache.size  # type: ignore[arg-type]
    del matcher
    gc.collect()
    assert cache.make_room(500) and cache.size == 0


def test_grammars_grow_with_the_tokens_that_follow_them() -> None:
    cache = GrammarCache(1 << 20)
    cache.put("x", Built(build(WORD), 1000))
    grammar = cache.get("x")
    assert grammar is not None
    matcher = grammar.start()
    for _ in range(10):
        matcher.accept(ord("a"))
    assert cache.size == 1000 + 10 * GROWTH_PER_TOKEN


async def test_each_space_has_its_own() -> None:
    """How fast a grammar comes must not tell what others have had compiled."""
    compiler = make_compiler()
    found = []
    for space in (b"one", b"another", b"one"):
        OWNER.set(Owner("key", space))
        found.append(await compiler.compile(WORD))
    assert found[0] is found[2] and found[0] is not found[1]
    compiler.close()


async def test_many_who_ask_for_the_same_wait_for_one() -> None:
    compiler = make_compiler()
    found: list[Grammar] = await asyncio.gather(*(compiler.compile(WORD) for _ in range(20)))
    assert len({id(each) for each in found}) == 1
    compiler.close()


async def test_a_refusal_that_is_kept_holds_none_of_those_who_got_it() -> None:
    """Each gets an error of his own, with the name of his field."""
    compiler = make_compiler()
    refusals = []
    for number in range(20):
        with pytest.raises(InvalidRequestError, match="is not JSON") as caught:
            await compiler.compile(Structure("json_schema", "{no", param=f"field_{number}"))
        refusals.append(caught.value)
    assert [each.param for each in refusals] == [f"field_{number}" for number in range(20)]
    lengths = {len(list(traceback.walk_tb(each.__traceback__))) for each in refusals[1:]}
    assert len(lengths) == 1 and all(each.__cause__ is None for each in refusals)
    compiler.close()


def replace_small(compiler: Compiler, small: Callable[[Structure], Built]) -> None:
    assert compiler._builder is not None
    compiler._builder.build_small = small  # type: ignore[method-assign]


async def test_a_failure_that_is_not_the_structure_s_fault_is_not_kept() -> None:
    compiler = make_compiler()
    assert compiler._builder is not None
    usual = compiler._builder.build_small

    def fail(structure: Structure) -> Built:
        raise MemoryError

    replace_small(compiler, fail)
    with pytest.raises(MemoryError):
        await compiler.compile(WORD)
    replace_small(compiler, usual)
    assert isinstance(await compiler.compile(WORD), Grammar)
    compiler.close()


class Slow:
    """Compiles when it is told to."""

    def __init__(self, compiler: Compiler) -> None:
        assert compiler._builder is not None
        self.begun, self.going_on = threading.Semaphore(0), threading.Event()
        self.seen: list[str] = []
        self._usual = compiler._builder.build_small
        replace_small(compiler, self._build)

    def _build(self, structure: Structure) -> Built:
        self.seen.append(structure.source)
        self.begun.release()
        assert self.going_on.wait(60)
        return self._usual(structure)


async def test_whoever_waits_when_the_model_is_closed_is_told() -> None:
    compiler = make_compiler()
    slow = Slow(compiler)
    waiting = [asyncio.ensure_future(compiler.compile(Structure("regex", f"x{n}"))) for n in range(3)]
    assert await asyncio.to_thread(slow.begun.acquire, timeout=30)
    compiler.close()
    with pytest.raises(ShuttingDownError):
        await waiting[-1]
    with pytest.raises(ShuttingDownError):
        await compiler.compile(WORD)
    slow.going_on.set()
    await asyncio.gather(*waiting, return_exceptions=True)


async def test_more_of_one_key_than_may_wait_are_sent_away_and_others_are_not() -> None:
    compiler = make_compiler(max_compiling=3)
    slow = Slow(compiler)

    async def ask(key: str, number: int) -> Grammar:
        OWNER.set(Owner(key))
        return await compiler.compile(Structure("regex", f"{key}{number}"))

    asked = [asyncio.ensure_future(ask("a", number)) for number in range(5)]
    assert await asyncio.to_thread(slow.begun.acquire, timeout=30)
    asked.append(asyncio.ensure_future(ask("b", 0)))
    await asyncio.sleep(0)
    slow.going_on.set()
    results = await asyncio.gather(*asked, return_exceptions=True)
    assert [isinstance(each, OverloadedError) for each in results] == [False, False, False, True, True, False]
    assert slow.seen == ["a0", "b0", "a1", "a2"], "keys take turns"
    compiler.close()


async def test_what_nobody_waits_for_is_not_compiled() -> None:
    compiler = make_compiler()
    slow = Slow(compiler)
    gone = asyncio.get_running_loop().create_future()

    async def ask(number: int, ended: asyncio.Future[None] | None) -> Grammar:
        OWNER.set(Owner(ended=ended))
        return await compiler.compile(Structure("regex", f"x{number}"))

    leaving = [asyncio.ensure_future(ask(number, gone)) for number in range(9)]
    staying = asyncio.ensure_future(ask(5, None))
    assert await asyncio.to_thread(slow.begun.acquire, timeout=30)
    gone.set_result(None)
    results = await asyncio.gather(*leaving, return_exceptions=True)
    assert all(isinstance(each, RequestCancelledError) for each in results)
    slow.going_on.set()
    assert isinstance(await staying, Grammar)
    assert slow.seen == ["x0", "x5"]
    assert not compiler._shared
    compiler.close()


async def test_whoever_asks_when_the_last_one_leaves_is_not_cancelled_with_it() -> None:
    compiler = make_compiler()
    slow = Slow(compiler)
    leaving = asyncio.ensure_future(compiler.compile(WORD))
    assert await asyncio.to_thread(slow.begun.acquire, timeout=30)
    leaving.cancel()
    coming = asyncio.ensure_future(compiler.compile(WORD))
    slow.going_on.set()
    assert isinstance(await coming, Grammar)
    compiler.close()


async def test_a_large_structure_is_tried_out_first_and_both_give_the_same() -> None:
    with pytest.raises(NotSmallError):
        builder().build_small(LARGE)
    compiler = make_compiler()
    matcher = (await compiler.compile(LARGE)).start()
    assert matcher.agreed([*b"9998", 257]) == 5 and matcher.agreed([*b"9999", 257]) < 5
    assert compiler.cache.size >= 100_000, "as measured"
    compiler.close()


async def test_a_structure_that_takes_too_much_is_refused_by_the_settings_names() -> None:
    compiler = make_compiler()

    async def exceed(*_: Any) -> Any:
        raise ExceededError("takes more than 1 s of CPU time")

    compiler._try_out = exceed
    with pytest.raises(InvalidRequestError, match=r"too complex.*structured\.compile_timeout_s"):
        await compiler.compile(LARGE)
    compiler.close()


async def test_structures_in_use_leave_no_room_for_another_large_one() -> None:
    compiler = make_compiler(max_cached_mb=4)
    compiler.cache.put("x", Built(build(WORD), 4 << 20))
    grammar = compiler.cache.get("x")
    assert grammar is not None
    matcher = grammar.start()
    with pytest.raises(OverloadedError, match=r"structured\.max_cached_mb"):
        await compiler.compile(LARGE)
    del matcher, grammar
    gc.collect()
    assert isinstance(await compiler.compile(LARGE), Grammar)
    compiler.close()


SMALL = {
    "usual": by_schema({"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "integer"}}}),
    "many properties": by_schema({"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(300)}}),
    "formats": by_schema({"type": "array", "items": {"type": "string", "format": "date-time"}}),
    "nested": by_schema({f"a{n}": 0 for n in range(5)} | {"type": "array", "items": {"enum": [*range(900)]}}),
    "choice": Structure("choice", json.dumps([f"choice {n}" for n in range(900)])),
    "expression": Structure("regex", "([a-z]{3,40}[0-9]{2,30} )*"),
}

_MEASURE = """
import sys
from structured_kit import builder
from cllm.structured.structure import Structure
small = builder().build_small(Structure("regex", "x"))
import ctypes
trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
def resident():
    trim and trim(0)
    return int(open("/proc/self/statm").read().split()[1]) * 4096
before = resident()
built = [builder().build_small(Structure(*sys.argv[1:])) for _ in range(8)]
print((resident() - before) / 8, built[0].memory)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("name", SMALL)
def test_small_grammars_take_no_more_memory_than_is_counted(name: str) -> None:
    structure = SMALL[name]
    command = [sys.executable, "-c", _MEASURE, structure.kind, structure.source]
    kits = {"PYTHONPATH": ":".join(path for path in sys.path if path)}
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120, env=kits)
    measured, counted = map(float, done.stdout.split())
    assert measured <= counted + 65_536, f"{measured / len(structure.source):.0f} bytes for each byte of the source"


def test_what_is_small_has_small_limits() -> None:
    assert building.SMALL_LIMITS.initial_lexer_fuel < building.LIMITS.initial_lexer_fuel
    assert building.SMALL_LIMITS.step_lexer_fuel == building.LIMITS.step_lexer_fuel, "they hold for answers, too"


_ENDS = """
import asyncio, sys, threading, time
from structured_kit import make_compiler, by_schema
async def main():
    compiler = make_compiler()
    build, begun = compiler._builder.build, threading.Event()
    def slow(*given):
        begun.set()
        time.sleep(0.5)
        return build(*given)
    compiler._builder.build = slow
    task = asyncio.ensure_future(compiler.compile(by_schema({"type": "integer", "multipleOf": 4999})))
    while not begun.is_set():
        await asyncio.sleep(0.001)
    task.cancel()
asyncio.run(main())
sys.exit(3)
"""


def test_the_process_ends_well_while_something_is_compiled() -> None:
    kits = {"PYTHONPATH": ":".join(path for path in sys.path if path)}
    ended = subprocess.run([sys.executable, "-c", _ENDS], env=kits, capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stderr) == (3, "")
