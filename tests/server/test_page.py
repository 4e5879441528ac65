"""The page at / and its stream: headers, key, what is sent and to whom, and that nothing is left behind."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import threading
import zipfile
from importlib.resources import files
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy

from cllm.engine.params import SamplingParams
from cllm.engine.stats import INTERVAL_S, MOST_SHARE, EngineView, ViewPublisher
from cllm.kv.groups import GroupKind
from cllm.kv.view import KVView, PrefixView, SequenceView
from cllm.server.page import encode, hub
from cllm.server.page.files import page_files
from engine_kit import make_request, make_scheduler
from http_kit import app_for, client_for, config_with
from page_stream import Reader, page_of, reading, watchers, watchers_gone
from repository import ROOT
from scripted_llm import ScriptedLLM
from server_process import serving
from thorough import slow

STATIC = ROOT / "src" / "cllm" / "server" / "page" / "static"
LONG = SamplingParams(max_tokens=2000, ignore_eos=True)
HOSTILE = "</script><script>window.hacked = 1</script>\n\ndata: x\n\n\" onerror='hacked()'\u2028"


# -- files ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted(page_files()))
async def test_every_file_comes_with_its_type_and_lets_nothing_foreign_in(path: str) -> None:
    async with client_for(ScriptedLLM()) as client:
        answer = await client.get(path)
        again = await client.get(path, headers={"if-none-match": answer.headers["etag"]})
    assert answer.status_code == 200 and answer.content
    kinds = {"/": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
    assert answer.headers["content-type"].startswith(kinds["/" if path == "/" else Path(path).suffix])
    policy = dict(part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; "))
    assert policy == {
        "default-src": "'none'",
        "script-src": "'self'",
        "style-src": "'self'",
        "connect-src": "'self'",
        "img-src": "'self'",
        "base-uri": "'none'",
        "frame-ancestors": "'none'",
        "form-action": "'none'",
    }
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"
    assert answer.headers["cache-control"] == "no-cache"
    assert (again.status_code, again.content) == (304, b"")


def test_nothing_is_inline_nothing_is_loaded_from_elsewhere_and_nothing_is_parsed_as_html() -> None:
    names = {file.name for file in STATIC.iterdir()}
    for file in STATIC.iterdir():
        text = file.read_text(encoding="utf-8").replace('xmlns="http://www.w3.org/2000/svg"', "")
        assert "://" not in text, file.name
        if file.suffix == ".html":
            assert not re.search(r"<style|\sstyle=|\son\w+=|javascript:", text)
            assert set(re.findall(r'(?:src|href)="(?:page/)?([^"#]+)"', text)) <= names
            assert re.findall(r"<script(.*?)></script>", text) == [' type="module" src="page/main.js"']
        if file.suffix == ".js":
            forbidden = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|Function\(|DOMParser|srcdoc"
            assert not re.search(forbidden, text), file.name
            assert set(re.findall(r'from "\./([^"]+)"', text)) <= names


def test_the_files_are_in_the_wheel(tmp_path: Path) -> None:
    """Without compiling anything."""
    command = [sys.executable, "-c", "from scikit_build_core.build import build_wheel as b; import sys; b(sys.argv[1]"]
    command[-1] += ", {'wheel.cmake': 'false'})"
    subprocess.run([*command, str(tmp_path)], cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = {name for name in zipfile.ZipFile(wheel).namelist() if "/page/static/" in name}
    assert {Path(name).name for name in names} == {file.name for file in STATIC.iterdir()}
    assert {file.name for file in files("cllm.server.page").joinpath("static").iterdir()} == {
        Path(name).name for name in names
    }


# -- who may see what ----------------------------------------------------------------------------------------------


async def test_the_page_is_open_but_its_data_need_the_key() -> None:
    async with page_of(api_key="sesame") as (_, app), httpx.AsyncClient(base_url=app.url) as client:
        for path in page_files():
            assert (await client.get(path)).status_code == 200
        for path in ("/kv/stream", "/kv", "/page/nothing.js", "/page/"):
            assert (await client.get(path)).status_code == 401
        assert (await client.get("/kv/stream", headers={"authorization": "Bearer wrong"})).status_code == 401
        async with reading(app.url, authorization="Bearer sesame") as events:
            assert (await anext(events)).kinds == ["whole"]


async def test_the_page_can_be_switched_off() -> None:
    async with client_for(ScriptedLLM(config=config_with(page=False))) as client:
        for path in (*page_files(), "/kv/stream"):
            assert (await client.get(path)).status_code == 404
    async with client_for(ScriptedLLM(config=config_with(page=False, api_key="sesame"))) as client:
        assert (await client.get("/")).status_code == 401


def test_the_page_is_not_part_of_the_described_api() -> None:
    paths = app_for(ScriptedLLM()).openapi()["paths"]
    assert not {*page_files(), "/kv/stream"} & set(paths)


async def test_the_beginning_of_prompts_is_sent_only_where_a_setting_allows_it() -> None:
    for allowed in (False, True):
        async with page_of(page_shows_prompts=allowed) as (llm, app):
            _ = [delta async for delta in llm.submit(f"secret plan {HOSTILE}" * 4, LONG)]
            async with reading(app.url) as events:
                prefixes = (await anext(events)).known["prefixes"]
        assert prefixes
        assert any(prefix.get("text", "").startswith("secret plan </script>") for prefix in prefixes) is allowed
        assert all(("text" in prefix) is allowed for prefix in prefixes)


async def test_a_hostile_name_stays_inside_its_event() -> None:
    async with page_of(model={"alias": HOSTILE}) as (_, app), reading(app.url) as events:
        assert (await anext(events)).known["model"] == HOSTILE


# -- the stream ----------------------------------------------------------------------------------------------------


async def test_a_stream_begins_whole_and_goes_on_with_changes() -> None:
    async with page_of(latency_ms=5.0) as (llm, app), reading(app.url) as events:
        reader = await anext(events)
        assert not reader.codes.any()
        generation = llm.submit("hello", LONG, request_id="mine")
        while not any(request["generated"] > 20 for request in reader.known["requests"]):
            reader = await anext(events)
        assert reader.kinds[0] == "whole" and set(reader.kinds[1:]) == {"change"}
        assert reader.versions == list(range(reader.versions[0], reader.versions[0] + len(reader.versions)))
        (request,) = reader.known["requests"]
        assert (request["id"], request["running"], request["prompt_tokens"], request["computed"]) == (
            "mine",
            True,
            5,
            5,
        )
        assert request["rate"] > 0 and request["age_s"] > 0
        private = reader.codes[reader.codes & 3 == encode.PRIVATE] >> 2
        assert set(private) <= set(request["holders"])
        assert (reader.codes & 3 == encode.SHARED).any()
        await generation.aclose()
        while reader.known["requests"]:
            reader = await anext(events)
        assert set(reader.codes & 3) == {0, encode.CACHED}
        now = reader.known["now"]
        assert now["kv"]["evictable"] == np.count_nonzero(reader.codes)
        assert now["resident_bytes"] > 1_000_000 and now["finished"] == {"cancelled": 1}


@pytest.mark.parametrize("groups", [{"window": 40}, {"states": 3}, {"window": 40, "states": 2}], ids=str)
async def test_cells_of_layers_that_do_not_keep_all_tokens_are_told_apart(groups: dict[str, int]) -> None:
    names = ["window"] * ("window" in groups) + ["state"] * ("states" in groups)
    async with page_of(latency_ms=2.0, **groups) as (llm, app), reading(app.url) as events:
        reader = await anext(events)
        assert [group["kind"] for group in reader.known["groups"]] == ["full", *names]

        def count(group: GroupKind, *states: int) -> int:
            ours = reader.codes >> encode.GROUP_BIT == encode.GROUPS[group]
            return int((ours & np.isin(reader.codes & 3, states)).sum())

        generation = llm.submit("a prompt that is far longer than the window " * 4, LONG, request_id="mine")
        while not any(request["generated"] > 40 for request in reader.known["requests"]):
            reader = await anext(events)
        for group in encode.GROUPS:
            seen = count(group, encode.PRIVATE, encode.SHARED), count(group, encode.CACHED)
            assert all(seen) if group in names else group == "full" or not any(seen)
        (request,) = reader.known["requests"]
        running = reader.codes[(reader.codes & 3 == encode.PRIVATE) & (reader.codes >> encode.GROUP_BIT > 0)]
        assert set(running >> 2 & (1 << 27) - 1) <= set(request["holders"])
        await generation.aclose()
        while reader.known["requests"] or count("full", encode.SHARED):
            reader = await anext(events)
        now = reader.known["now"]["kv"]
        assert [group["kind"] for group in now["groups"]] == ["full", *names]
        for group in now["groups"]:
            cells = group["block_bytes"] // now["bytes_per_unit"]
            assert count(group["kind"], encode.CACHED) == cells * group["evictable"] > 0 == group["used"]
        assert now["snapshots"] == sum(each["snapshots"] for each in reader.known["prefixes"]) > 0
        report = llm.executor.kv()
        evictable = sum(group["evictable"] * group["block_bytes"] for group in report["groups"])
        assert evictable == report["bytes"]["evictable"] and report["bytes"]["referenced"] == 0
        assert all(group["bytes_per_sequence"] for group in report["groups"][1:])


async def test_slots_are_shown_as_well() -> None:
    async with page_of(latency_ms=5.0, layout="slots") as (llm, app), reading(app.url) as events:
        reader = await anext(events)
        generation = llm.submit("hello", LONG, request_id="mine")
        while not reader.known["requests"] or not reader.codes.any():
            reader = await anext(events)
        assert reader.known["layout"] == "slots"
        assert set(reader.codes & 3) == {0, encode.PRIVATE} and reader.resident.any()
        await generation.aclose()
        while reader.known["requests"]:
            reader = await anext(events)
        assert set(reader.codes & 3) == {0, encode.CACHED}
        assert [prefix["users"] for prefix in reader.known["prefixes"]] == [0]


@slow
async def test_two_watchers_see_the_same() -> None:
    async with page_of(latency_ms=2.0) as (llm, app), reading(app.url) as early:
        first = await anext(early)
        _ = [delta async for delta in llm.submit("a prompt that is long enough to be cached", LONG)]
        while first.known["requests"] or not first.codes.any():
            first = await anext(early)
        async with reading(app.url) as late:
            second = await anext(late)
            assert second.kinds == ["whole"]
            assert (first.codes == second.codes).all()
            assert first.known["resident"] == second.known["resident"]
            assert first.known["prefixes"] == second.known["prefixes"]


@settings(deadline=None)
@given(
    st.lists(
        st_numpy.arrays(np.int32, 60, elements=st.integers(0, 5)),
        min_size=1,
        max_size=5,
    ),
    st.frozensets(st.integers(1, 5)),
)
def test_whole_and_changes_lead_to_the_same_map(moments: list[Any], used: frozenset[int]) -> None:
    frame, reader = None, Reader()
    sequences = tuple(SequenceView(number, f"r{number}", 9, 3) for number in range(1, 6) if number not in used)
    prefix = PrefixView(min(used, default=1), 0, 16, 2, 1, (104, 105))
    for number, holders in enumerate(moments):
        resident = holders.reshape(-1, 6).any(axis=1)
        view = KVView("paged", 16, 64, holders, resident, 6, (prefix,), 1, used, sequences)
        source = encode.Source(number + 1, EngineView(number, view, (), 0), {}, {"time": number}, None)
        after = encode.frame_of(frame, source)
        reader.take_raw(encode.whole(after) if frame is None else encode.change(frame, after))
        frame = after
        expected = [0 if h == 0 else h * 4 + (encode.SHARED if h in used else encode.PRIVATE) for h in holders.tolist()]
        assert reader.codes.tolist() == expected
        assert (reader.resident == resident).all()


def test_another_number_of_cells_is_sent_whole() -> None:
    views = [
        KVView("slots", 16, 64, np.zeros(n, np.int32), np.ones(1, np.bool_), n, (), 0, frozenset(), ()) for n in (4, 8)
    ]
    frames = [encode.frame_of(None, encode.Source(1, EngineView(1, view, (), 0), {}, {}, None)) for view in views]
    assert encode.change(*frames).startswith(b"event: whole\n")


# -- watchers come and go ------------------------------------------------------------------------------------------


async def test_who_reads_slowly_gets_the_newest_frame_instead_of_a_backlog() -> None:
    async with page_of(latency_ms=2.0) as (llm, _):
        source = hub.Hub(llm, llm.config)
        events = source.events()
        reader = Reader()
        reader.take_raw(await anext(events))
        generation = llm.submit("hello", LONG)
        while source._frame is None or source._frame.version <= reader.versions[0] + hub.RECENT:
            await asyncio.sleep(0.01)
        newest = source._frame.version
        reader.take_raw(await anext(events))
        assert reader.kinds == ["whole", "whole"] and reader.versions[-1] >= newest
        await generation.aclose()
        await events.aclose()
        assert (source.watchers, watchers(llm)) == (0, 0)


async def test_who_comes_when_nobody_watched_sees_what_happened_meanwhile() -> None:
    async with page_of() as (llm, _):
        source = hub.Hub(llm, llm.config)
        first = source.events()
        reader = Reader()
        reader.take_raw(await anext(first))
        await first.aclose()
        async for _ in llm.submit("a prompt of more than one block of sixteen tokens", SamplingParams(max_tokens=4)):
            pass
        events = source.events()
        again = Reader()
        again.take_raw(await anext(events))
        assert again.kinds == ["whole"] and again.versions[0] > reader.versions[-1]
        await events.aclose()


@pytest.mark.parametrize(("inline_s", "in_thread"), [(-1.0, [True, True]), (1e9, [True, False])])
async def test_whole_frames_are_encoded_beside_the_event_loop_unless_that_is_quick(
    monkeypatch: pytest.MonkeyPatch, inline_s: float, in_thread: list[bool]
) -> None:
    encoded: list[bool] = []

    def whole(frame: encode.Frame) -> bytes:
        encoded.append(threading.current_thread() is not threading.main_thread())
        return encode.whole(frame)

    monkeypatch.setattr(hub, "whole", whole)
    monkeypatch.setattr(hub, "INLINE_S", inline_s)
    async with page_of() as (llm, _):
        source = hub.Hub(llm, llm.config)
        first, second, third = source.events(), source.events(), source.events()
        together = await asyncio.gather(anext(first), anext(second))
        assert together[0] == together[1] and len(encoded) == 1
        generation = llm.submit("hello", LONG)
        await anext(first)
        await anext(third)
        assert encoded == in_thread
        await generation.aclose()
        for events in (first, second, third):
            await events.aclose()


async def test_who_is_a_little_behind_gets_all_it_missed() -> None:
    async with page_of(latency_ms=2.0) as (llm, _):
        source = hub.Hub(llm, llm.config)
        events = source.events()
        reader = Reader()
        reader.take_raw(await anext(events))
        generation = llm.submit("hello", LONG)
        while source._frame is None or source._frame.version < reader.versions[0] + 3:
            await asyncio.sleep(0.01)
        reader.take_raw(await anext(events))
        assert reader.kinds[1:] == ["change"] * (len(reader.kinds) - 1) and len(reader.kinds) >= 4
        await generation.aclose()
        await events.aclose()


async def test_there_is_a_limit_of_watchers() -> None:
    async with page_of(max_watchers=2) as (llm, app), httpx.AsyncClient(base_url=app.url) as client:
        async with reading(app.url) as one:
            await anext(one)
            async with reading(app.url) as two:
                await anext(two)
                refused = await client.get("/kv/stream")
                assert (refused.status_code, refused.json()["error"]["code"]) == (503, "too_many_watchers")
                assert refused.headers["retry-after"] == "10"
        await watchers_gone(llm, app)
        async with reading(app.url) as three:
            assert (await anext(three)).kinds == ["whole"]


@slow
async def test_many_who_come_and_go_leave_nothing_behind() -> None:
    async with page_of(latency_ms=1.0) as (llm, app):
        generation = llm.submit("busy", LONG)

        async def visit(number: int) -> None:
            async with reading(app.url) as events:
                for _ in range(number % 3):
                    await anext(events)

        for _ in range(2):
            await asyncio.gather(*(visit(number) for number in range(20)))
        await generation.aclose()
        await watchers_gone(llm, app)
        assert llm.executor.engine is not None and llm.executor.engine.views.latest is None


async def test_a_stream_ends_with_the_server() -> None:
    with serving("server.shutdown_grace_s=1") as server:
        with httpx.stream("GET", f"{server.url}/kv/stream", timeout=60) as response:
            events = response.iter_raw()
            assert next(events).startswith(b"event: whole\n")
            server.process.terminate()
            assert all(piece.startswith(b"event: ") for piece in events)
        assert server.end() == 0
        assert not server.logged("Traceback")


# -- the engine's side ---------------------------------------------------------------------------------------------


def test_pictures_are_made_only_while_somebody_watches_and_not_too_often() -> None:
    from cllm.backends.fake import FakeBackend

    now = 100.0
    scheduler = make_scheduler(FakeBackend())
    made = 0
    view = scheduler.kv.view

    def counted() -> KVView:
        nonlocal made, now
        made += 1
        now += cost
        return view()

    scheduler.kv.view = counted  # type: ignore[method-assign]
    views = ViewPublisher(lambda: now)
    cost = 0.0
    views.publish(scheduler.requests, scheduler.kv)
    assert (made, views.latest, views.due_at) == (0, None, None)
    views.add_watcher()
    views.publish(scheduler.requests, scheduler.kv)
    assert made == 1 and views.latest is not None and views.due_at is None
    scheduler.requests.add(make_request("hello", request_id="late"))
    views.publish(scheduler.requests, scheduler.kv)
    assert made == 1 and views.due_at == now + INTERVAL_S
    now += INTERVAL_S
    cost = 0.004
    views.publish(scheduler.requests, scheduler.kv)
    assert made == 2 and views.due_at is None
    assert [request.id for request in views.latest.requests] == ["late"]
    now += INTERVAL_S
    views.publish(scheduler.requests, scheduler.kv)
    assert made == 2 and views.due_at == pytest.approx(now + 0.004 / MOST_SHARE - INTERVAL_S - 0.004)
    views.remove_watcher()
    views.publish(scheduler.requests, scheduler.kv)
    assert (made, views.latest, views.due_at) == (2, None, None)


@slow
async def test_a_picture_shows_the_last_change_though_nothing_happens_any_more() -> None:
    async with page_of() as (llm, app), reading(app.url) as events:
        reader = await anext(events)
        for number in range(5):
            _ = [delta async for delta in llm.submit(f"prompt number {number} of many", LONG)]
        while reader.known["now"]["generated_tokens"] < 5 * 2000 or reader.known["requests"]:
            reader = await anext(events)
        assert np.count_nonzero(reader.codes) == llm.executor.kv()["evictable"]


# -- the benchmark -------------------------------------------------------------------------------------------------
