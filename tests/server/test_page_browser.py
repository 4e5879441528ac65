"""The page in a real Chromium: it draws, follows and chats, and what anybody wrote never becomes more than text."""

from __future__ import annotations

import re
import socket
import statistics
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import pytest

from browser_kit import Browser, needs_browser
from server_process import Served, post, read_all, serving, until
from thorough import slow

pytestmark = needs_browser

SMALL = "resources.kv_cache_max_memory_mb=1"
HOSTILE = "<img src=x onerror='window.hacked=1'><script>window.hacked=1</script>&lt;b&gt;"
PIXELS = """
const map = document.getElementById("map");
const copy = Object.assign(document.createElement("canvas"), { width: map.width, height: map.height });
const context = copy.getContext("2d", { willReadFrequently: true });
context.drawImage(map, 0, 0);
const { data } = context.getImageData(0, 0, map.width, map.height);
const colours = new Set();
for (let at = 0; at < data.length; at += 4) colours.add(data[at] << 16 | data[at + 1] << 8 | data[at + 2]);
return colours.size;
"""

EVERY_CELL = """
const map = document.getElementById("map");
const texts = new Set();
const press = (key) => {
  map.dispatchEvent(new KeyboardEvent("keydown", { key }));
  texts.add(document.getElementById("map-cell").textContent);
};
press("Home");
for (let count = -1; texts.size > count; press("ArrowRight")) count = texts.size;
return [...texts];
"""
"""What is said of each."""


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with serving("backend.fake.latency_ms=10", SMALL) as server:
        yield server


@contextmanager
def streaming(server: Served, *prompts: str) -> Iterator[None]:
    """Answers that go on for as long as the block runs."""
    with ExitStack() as stack:
        for number, prompt in enumerate(prompts):
            connection = stack.enter_context(server.connect())
            body = {"prompt": prompt, "max_tokens": 3000, "ignore_eos": True, "stream": True}
            connection.sendall(post("/v1/completions", body, f"x-request-id: stream-{number}"))
            assert connection.recv(65_536).startswith(b"HTTP/1.1 200")
            reading = threading.Thread(target=read_all, args=(connection,))
            reading.start()
            stack.callback(reading.join)
            stack.callback(connection.shutdown, socket.SHUT_RDWR)
        yield


def ask(browser: Browser, text: str) -> None:
    browser.js("document.getElementById('prompt').value = arguments[0]", text)
    browser.find("#send").click()


def endless(browser: Browser, most: int) -> None:
    """Have every answer go on to its limit: where the fake model ends one is chance."""
    browser.js(
        """
        document.getElementById("max-tokens").value = arguments[0];
        const fetch = window.fetch;
        window.fetch = (url, options) =>
          fetch(url, options.body ? { ...options, body: options.body.replace("{", '{"ignore_eos": true, ') } : options);
        """,
        most,
    )


def answered(browser: Browser) -> str:
    """Wait for the end of the answer; what stands below it."""
    browser.until("document.querySelector('.message.assistant:last-child small') !== null")
    return browser.text(".message.assistant:last-child small")


# -- it draws and follows ------------------------------------------------------------------------------------------


def test_the_page_loads_without_a_complaint_and_the_map_changes_with_a_request(
    browser: Browser, server: Served
) -> None:
    browser.open(server.url)
    browser.live()
    browser.until("document.getElementById('n-released').textContent !== '–'")
    assert browser.text("#model") == "fake"
    quiet = browser.js(PIXELS)
    with streaming(server, "one " * 20, "two " * 20):
        browser.until("document.querySelectorAll('#requests tr').length === 2")
        browser.until("Number(document.getElementById('n-private').textContent) >= 1")
        browser.until("document.querySelectorAll('#tree tr').length >= 2")
        browser.until("Number(document.getElementById('rate').textContent) > 0")
        assert browser.js(PIXELS) > quiet
        assert "stream-0" in browser.text("#requests")
    browser.until("document.querySelectorAll('#requests tr').length === 0")
    browser.until("document.getElementById('events').textContent.includes('2 requests cancelled')")
    assert "private 0 %" in browser.find("#map").get_attribute("aria-label")
    assert browser.complaints() == []


def test_how_orderly_memory_is_and_what_windows_dropped_is_shown(browser: Browser, server: Served) -> None:
    browser.open(server.url)
    browser.live()
    window = {"keep": 4, "recent": 32}
    body = {"prompt": "one", "max_tokens": 300, "ignore_eos": True, "context_window": window}
    assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).status_code == 200
    dropped = httpx.get(f"{server.url}/kv").json()["dropped_tokens"]
    assert dropped > 0
    text = f"tokens dropped by windows {dropped:,} · "
    browser.until(f"document.getElementById('map-order').textContent.includes('{text}')")
    shown = browser.text("#map-order")
    assert "contiguous · free runs " in shown and "given back" in shown and shown.endswith("upkeep failures 0")


def test_layers_with_a_window_have_colours_a_row_and_words_of_their_own(browser: Browser, server: Served) -> None:
    browser.open(server.url)
    browser.live()
    assert browser.js("return document.getElementById('groups').getClientRects().length") == 0, (
        "one group needs no table"
    )
    with serving("backend.fake.latency_ms=10", "backend.fake.window=100", "backend.fake.states=3", SMALL) as windows:
        browser.open(windows.url)
        browser.live()
        with streaming(windows, "one " * 80):
            browser.until("document.querySelectorAll('#groups tr').length === 3")
            browser.until("Number(document.getElementById('n-apart').textContent) > 0")
            browser.until("document.getElementById('groups').textContent.includes('1 kept')")
            row = browser.text("#groups tr:nth-child(2)")
            assert row.startswith("attend to the last 100 tokens2up to ") and row.endswith("0 used, 0 dropped")
            colours = browser.js(
                "return [...document.querySelectorAll('#groups .swatch')]"
                ".map((swatch) => getComputedStyle(swatch).background)"
            )
            assert len(set(colours)) == 6
            assert browser.text("#groups tr:last-child").startswith("carry a state1up to ")
            seen = {each.partition(": ")[2].partition(";")[0] for each in browser.js(EVERY_CELL)}
            assert {"window, running", "state, running"} <= seen
            assert any(text.startswith("window, kept snapshot") for text in seen)
    assert browser.complaints(lambda text: "ERR_" in text) == []


def test_a_cell_says_who_holds_it_and_a_row_picks_its_cells_out(browser: Browser, server: Served) -> None:
    from selenium.webdriver.common.keys import Keys

    browser.open(server.url)
    browser.live()
    with streaming(server, "somebody " * 30):
        browser.until("document.querySelectorAll('#requests tr').length === 1")
        browser.until("document.querySelectorAll('#tree tr').length >= 1")
        browser.find("#map").send_keys(Keys.HOME, Keys.ARROW_RIGHT)
        assert browser.text("#map-cell").startswith("Cell 1: ")
        before = browser.js(PIXELS)
        browser.find("#requests button").click()
        assert browser.find("#requests button").get_attribute("aria-pressed") == "true"
        browser.until(f"(() => {{ {PIXELS} }})() !== {before}")
    assert browser.complaints() == []


@slow
def test_a_page_that_is_left_keeps_no_connection_and_goes_on_when_it_is_back(browser: Browser, server: Served) -> None:
    for _ in range(8):
        browser.open(server.url)
        browser.live()
        browser.open("about:blank")
    browser.driver.back()
    browser.live()
    with streaming(server, "still there?"):
        browser.until("document.querySelectorAll('#requests tr').length === 1")
    assert browser.complaints() == []


def test_evictions_are_told(browser: Browser) -> None:
    with serving("resources.kv_cache_max_memory_mb=0.02") as server:
        browser.open(server.url)
        browser.live()
        body = {"prompt": [f"{number} " * 100 for number in range(40)], "max_tokens": 5, "ignore_eos": True}
        httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).raise_for_status()
        browser.until("document.getElementById('events').textContent.includes('evicted')")
        browser.until("document.getElementById('hit-rate').textContent !== '–'")
        assert browser.complaints() == []


# -- chat ----------------------------------------------------------------------------------------------------------


def test_a_chat_streams_and_says_what_came_from_the_cache(browser: Browser, server: Served) -> None:
    browser.open(server.url)
    browser.live()
    endless(browser, 20)
    ask(browser, "hello there, how are you today?")
    assert re.fullmatch(
        r"20 tokens · [\d.]+ tokens/s · first after .* prompt tokens from the cache \(.*\)", answered(browser)
    )
    ask(browser, "and again")
    browser.until("document.querySelectorAll('.message small').length === 2")
    cached, prompt = map(int, re.findall(r"(\d+) of (\d+) prompt", answered(browser))[0])
    assert 0 < cached < prompt
    assert browser.js("return document.querySelectorAll('.message').length") == 4
    assert browser.complaints() == []


def test_reasoning_is_folded_away_and_streamed(browser: Browser, server: Served) -> None:
    browser.open(server.url)
    browser.live()
    browser.js(REASONS, HOSTILE)
    reasoning = "document.querySelector('.message.assistant details.reasoning')"
    browser.until(f"{reasoning}?.textContent === 'Reasoning' + 'Hm. '")
    assert browser.js(f"return {reasoning}.open") is False
    browser.find(".message.assistant details.reasoning summary").click()
    assert browser.js(f"return {reasoning}.open") is True
    browser.js("window.next()")
    browser.until("window.done === true")
    assert browser.text(".message.assistant .reasoning") == f"ReasoningHm. {HOSTILE}"
    assert browser.js(f"return {reasoning}.nextSibling.textContent") == "Paris."
    assert answered(browser).startswith("3 tokens")
    # The next request has it, for the templates that keep it.
    assert browser.js("return window.chat.messages") == [
        {"role": "user", "content": "Where?"},
        {"role": "assistant", "content": "Paris.", "reasoning_content": f"Hm. {HOSTILE}"},
    ]
    assert browser.js("return window.hacked") is None
    assert browser.complaints() == []


def test_an_answer_can_be_stopped_with_the_button_and_with_escape(browser: Browser, server: Served) -> None:
    from selenium.webdriver.common.keys import Keys

    browser.open(server.url)
    browser.live()
    endless(browser, 3000)
    for number in range(2):
        ask(browser, "go on for ever")
        browser.until(f"(document.querySelectorAll('.message.assistant')[{number}]?.textContent ?? '').length > 3")
        if number == 0:
            browser.find("#stop").click()
        else:
            browser.find("body").send_keys(Keys.ESCAPE)
        browser.until(f"document.querySelectorAll('.message.assistant small').length === {number + 1}")
        assert browser.text(".message.assistant:last-child small").startswith("stopped")
    until(server.idle)
    assert browser.complaints() == []


def test_a_refusal_is_shown_in_the_servers_own_words(browser: Browser, server: Served) -> None:
    browser.open(server.url)
    browser.live()
    ask(browser, "x" * 5000)
    assert "context" in answered(browser)
    browser.complaints(lambda message: "400" in message)


def test_a_chat_with_a_real_model(browser: Browser) -> None:
    with serving("resources.kv_cache_max_memory_mb=256", backend="native") as server:
        browser.open(server.url)
        browser.live()
        assert browser.text("#backend").startswith("native")
        browser.until("document.getElementById('temperature').placeholder === '0.2'")
        browser.js("document.getElementById('temperature').value = 0")
        ask(browser, "What is the capital of France? Answer in one sentence.")
        assert "tokens/s" in answered(browser)
        assert "Paris" in browser.text(".message.assistant")
        browser.until("Number(document.getElementById('n-cached').textContent) >= 1")
        assert browser.complaints() == []


# -- hostile text --------------------------------------------------------------------------------------------------


def test_nothing_that_somebody_wrote_is_taken_for_html(browser: Browser) -> None:
    with serving(f"model.alias={HOSTILE}", "server.page_shows_prompts=true", "backend.fake.latency_ms=10") as server:
        browser.open(server.url)
        browser.live()
        with streaming(server, HOSTILE * 3):
            browser.until("document.getElementById('tree').textContent.includes('onerror')")
            ask(browser, HOSTILE)
            browser.until("document.querySelector('.message.user') !== null")
            assert browser.text(".message.user") == HOSTILE
            assert browser.text("#model") == HOSTILE
            # An echo of the model, as an event of the chat.
            browser.js(ECHO, HOSTILE)
            browser.until("window.echoed === true")
        assert browser.js("return window.hacked") is None
        assert browser.js("return document.querySelectorAll('main img, main script, header script').length") == 0
        assert browser.complaints() == []


ECHO = """
const text = arguments[0];
import("/page/chat.js").then(async ({ Chat }) => {
  const chat = new Chat();
  const event = { choices: [{ delta: { content: text } }] };
  window.fetch = async () => new Response(`data: ${JSON.stringify(event)}\\n\\ndata: [DONE]\\n\\n`);
  document.getElementById("prompt").value = "say it";
  await chat.send();
  window.echoed = document.getElementById("messages").textContent.includes(text);
});
"""


REASONS = """
const text = arguments[0];
import("/page/chat.js").then(async ({ Chat }) => {
  const chat = (window.chat = new Chat());
  const event = (delta) => `data: ${JSON.stringify({ choices: [{ delta }] })}\\n\\n`;
  window.fetch = async () => new Response(new ReadableStream({
    start(stream) {
      const send = (text) => stream.enqueue(new TextEncoder().encode(text));
      send(event({ role: "assistant", reasoning_content: "Hm. " }));
      window.next = () => {
        send(event({ reasoning_content: text }) + event({ content: "Paris." }) + "data: [DONE]\\n\\n");
        stream.close();
      };
    },
  }));
  document.getElementById("prompt").value = "Where?";
  await chat.send();
  window.done = true;
});
"""


# -- key, theme, phone ---------------------------------------------------------------------------------------------


def test_a_key_is_asked_for_kept_and_forgotten(browser: Browser) -> None:
    with serving("server.api_key=sesame", "server.shutdown_grace_s=0") as server:
        browser.open(server.url)
        browser.until("document.getElementById('key-dialog').open")
        assert browser.text("#model") == "…"
        browser.find("#key").send_keys("wrong\n")
        browser.until("document.getElementById('key-error').textContent !== ''")
        browser.find("#key").send_keys("sesame\n")
        browser.live()
        assert browser.text("#model") == "fake"
        endless(browser, 5)
        ask(browser, "let me in")
        assert answered(browser).startswith("5 tokens")
        browser.driver.refresh()
        browser.live()
        browser.find("#forget-key").click()
        browser.until("document.getElementById('key-dialog').open")
        assert browser.complaints(lambda message: "401" in message) == []


@pytest.mark.parametrize("system", ["dark", "light"])
def test_it_is_dark_or_light_as_the_system_says_until_told_otherwise(
    browser: Browser, server: Served, system: str
) -> None:
    browser.emulate(prefers_color_scheme=system)
    browser.open(server.url)
    browser.live()
    assert darkness(browser) is (system == "dark")
    browser.find("#theme").click()
    assert darkness(browser) is False
    browser.find("#theme").click()
    assert darkness(browser) is True
    browser.driver.refresh()
    browser.live()
    assert darkness(browser) is True and browser.text("#theme") == "Theme: dark"
    assert browser.complaints() == []


def darkness(browser: Browser) -> bool:
    colour: str = browser.js("return getComputedStyle(document.body).backgroundColor")
    return sum(map(int, colour.removeprefix("rgb(").removesuffix(")").split(","))) < 3 * 128


@pytest.mark.parametrize("width", [320, 390, 800, 1280])
def test_it_fits_every_screen_without_scrolling_sideways(browser: Browser, server: Served, width: int) -> None:
    browser.size(width, 780, 2.0, mobile=width < 500)
    browser.open(server.url)
    browser.live()
    with streaming(server, "a rather long prompt " * 10):
        browser.until("document.querySelectorAll('#requests tr').length === 1")
        ask(browser, "w" * 300)
        browser.until("document.querySelector('.message.user') !== null")
        assert browser.js("return document.documentElement.scrollWidth <= innerWidth")
        canvas = browser.js("const c = document.getElementById('map'); return [c.clientWidth, c.width, c.height]")
        assert 0 < canvas[0] < width and canvas[1] > 0 and canvas[2] > 0
    assert browser.complaints() == []


def test_everything_that_can_be_used_has_a_name(browser: Browser, server: Served) -> None:
    browser.open(server.url)
    browser.live()
    nodes = browser.driver.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
    roles = {"button", "textbox", "spinbutton", "img", "image", "table", "region", "log", "link"}
    used = [node for node in nodes if not node["ignored"] and node["role"]["value"] in roles]
    assert {"button", "textbox", "log"} <= {node["role"]["value"] for node in used}
    nameless = [node["role"] for node in used if not node.get("name", {}).get("value") and _is_ours(node)]
    assert nameless == []


def _is_ours(node: dict[str, Any]) -> bool:
    """Tables take their name from the region around them."""
    return node["role"]["value"] != "table"


# -- many blocks ---------------------------------------------------------------------------------------------------


@slow
def test_a_hundred_thousand_blocks(browser: Browser, record_property: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Reports what a frame takes; asserts only that all of them are there."""
    with serving("resources.kv_cache_max_memory_mb=12.5", "backend.fake.latency_ms=2") as server:
        prompts = [f"{number} " * 300 for number in range(30)]
        body = {"prompt": prompts, "max_tokens": 40, "ignore_eos": True}
        httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).raise_for_status()
        browser.open(server.url)
        browser.live()
        browser.until("document.getElementById('map-facts').textContent.startsWith('102,400 blocks')")
        with streaming(server, *("busy " * 200 + str(number) for number in range(16))):
            browser.until("document.querySelectorAll('#requests tr').length === 16")
            frames = browser.driver.execute_async_script(FRAMES)
        assert len(frames) > 10
        text = f"{statistics.median(frames):.1f} ms between frames, {max(frames):.1f} ms at most"
        record_property("frames", text)
        with capsys.disabled():
            print(f"\n100,000 blocks, 16 streams: {text}")
        assert browser.complaints() == []


FRAMES = """
const done = arguments[arguments.length - 1];
const gaps = [];
let last = performance.now();
const began = last;
function tick(now) {
  gaps.push(now - last);
  last = now;
  if (now - began < 1000) requestAnimationFrame(tick);
  else done(gaps.slice(1));
}
requestAnimationFrame(tick);
"""
