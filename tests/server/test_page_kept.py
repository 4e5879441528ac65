"""The page in a real Chromium: what is kept on disk, what is pinned, several models, and who may see it."""

from __future__ import annotations

from pathlib import Path

import httpx

from browser_kit import Browser, needs_browser
from cllm.server.auth.key_file import add_key
from server_process import Served, serving
from thorough import slow

pytestmark = needs_browser

LONG = "once upon a time " * 60
TWO_MODELS = ("models=[one, {name: two, load: first_use}]", "resources.max_memory_mb=4")


def shows(browser: Browser, where: str, text: str) -> None:
    """Wait until it does."""
    browser.until(f"document.getElementById('{where}').textContent.includes({text!r})")


def complete(server: Served, **body: object) -> None:
    httpx.post(f"{server.url}/v1/completions", json={"max_tokens": 4, **body}, timeout=60).raise_for_status()


def press(browser: Browser, where: str, text: str) -> None:
    """A button by its text, as soon as it is there and can be pressed."""
    found = f"[...document.querySelectorAll('{where} button:enabled')].find((each) => each.textContent === {text!r})"
    browser.until(f"Boolean({found})")
    browser.js(f"{found}.click()")


# -- what is kept --------------------------------------------------------------------------------------------------


@slow
def test_what_is_written_to_disk_and_loaded_from_it_is_shown(browser: Browser, tmp_path: Path) -> None:
    disk = ("kv.disk.enabled=true", f"kv.disk.directory={tmp_path}", "kv.disk.max_mb=16")
    with serving(*disk, "backend.fake.latency_ms=20") as server:
        browser.open(server.url)
        browser.live()
        shows(browser, "disk-size", "0 B of 16 MiB")
        shows(browser, "disk-facts", str(tmp_path))
        complete(server, prompt=LONG)
        shows(browser, "events", "written to disk")
        shows(browser, "disk-facts", "nothing being written · written ")
        browser.until("document.getElementById('disk-bar').value > 0")
        assert httpx.get(f"{server.url}/kv").json()["disk"]["bytes"] == browser.js(
            "return document.getElementById('disk-bar').value"
        )
        browser.open("about:blank")
        server.process.terminate()
        assert server.end() == 0
    with serving(*disk, "backend.fake.latency_ms=20") as server:
        browser.open(server.url)
        browser.live()
        complete(server, prompt=LONG)
        loaded = httpx.get(f"{server.url}/kv").json()["disk"]["loaded_tokens"]
        assert loaded > 512
        shows(browser, "disk-facts", f"loaded {loaded:,} tokens in 1 load")
        shows(browser, "events", f"{loaded:,} tokens loaded from disk")
        assert browser.find("#disk-trouble").is_displayed() is False
        assert browser.complaints() == []


def test_why_nothing_is_written_is_said_in_words(browser: Browser, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    disk = ("kv.disk.enabled=true", f"kv.disk.directory={tmp_path / 'file' / 'kv'}")
    with serving(*disk, "backend.fake.latency_ms=20") as server:
        browser.open(server.url)
        browser.live()
        complete(server, prompt=LONG)
        shows(browser, "disk-trouble", "Nothing is written now: Not a directory")
        assert browser.find("#disk-trouble").is_displayed()


def test_without_a_disk_it_says_so(browser: Browser) -> None:
    with serving() as server:
        browser.open(server.url)
        browser.live()
        shows(browser, "disk-size", "nothing is kept")
        assert not browser.find("#disk-bar").is_displayed() and not browser.find("#host").is_displayed()


def test_pins_are_listed_with_their_time_and_who_made_them_and_can_be_ended(browser: Browser) -> None:
    warm = "kv.warm=[{prompt: 'a text that many prompts begin with, and that has more than a block'}]"
    with serving(warm, "server.page_shows_prompts=true") as server:
        browser.open(server.url)
        browser.live()
        shows(browser, "pins", "no end")
        complete(server, prompt=LONG, cache_control={"type": "ephemeral", "ttl": "1h"})
        browser.until("document.querySelectorAll('#pins tr').length === 2")
        shows(browser, "pins", "once upon a time")  # the tree with its texts may come after the pin
        first, second = (row.text for row in browser.driver.find_elements("css selector", "#pins tr"))
        assert first.startswith("once upon a time") and "mark" in first and ("59 min" in first or "1 h" in first)
        assert second.startswith("a text that many") and "warm" in second and "no end" in second
        browser.find("#pins tr button").click()
        assert browser.find("#pins tr button").get_attribute("aria-pressed") == "true"
        press(browser, "#pins", "Unpin")
        browser.until("document.querySelectorAll('#pins tr').length === 1")
        assert httpx.get(f"{server.url}/kv").json()["pins"] == 1
        press(browser, "#pins", "Unpin")
        shows(browser, "no-pins", "No prefix is pinned.")
        browser.until("!document.getElementById('no-pins').hidden")
        assert browser.complaints() == []


def test_memory_of_the_host_is_shown_where_there_is_some(browser: Browser) -> None:
    with serving() as server:
        browser.open(server.url)
        browser.live()
        size, facts, hidden = browser.driver.execute_async_script(HOST)
        assert size == "1 GiB of 4 GiB"
        assert facts.startswith("loaded 64 tokens in 2 loads, 1 of which brought less")
        assert hidden is False


HOST = """
const done = arguments[arguments.length - 1];
import("/page/kept.js").then(({ Kept }) => {
  const kept = new Kept({}, { onChange() {} });
  const copied = { out_bytes: 3 * 2 ** 30, in_bytes: 2 ** 20 };
  kept.showHost({ limit_bytes: 4 * 2 ** 30, bytes: 2 ** 30, loads: 2, loaded_tokens: 64, failed_loads: 1, ...copied });
  // At once: the server, which has none, tells the page so with its next news.
  const shown = (id) => document.getElementById(id);
  done([shown("host-size").innerText, shown("host-facts").innerText, shown("host").hidden]);
});
"""


def test_what_comes_into_the_tree_and_leaves_it_is_told(browser: Browser) -> None:
    with serving("resources.kv_cache_max_memory_mb=0.02") as server:
        browser.open(server.url)
        browser.live()
        complete(server, prompt="x" * 160)
        browser.until("document.querySelectorAll('#cache-events li[data-kind=stored]').length === 1")
        assert browser.text("#cache-events li span").startswith("stored 10 blocks, 160 tokens ")
        name = browser.text("#cache-events code")
        browser.until(f"document.querySelector('#tree button')?.title === 'ends with block {name}'")
        complete(server, prompt=[f"{number} " * 100 for number in range(40)])
        browser.until("document.querySelectorAll('#cache-events li[data-kind=removed]').length > 0")
        shows(browser, "cache-events-facts", "since the start")
        assert browser.complaints() == []


def test_what_slots_store_is_told_in_blocks(browser: Browser) -> None:
    with serving("backend.fake.layout=slots") as server:
        browser.open(server.url)
        browser.live()
        complete(server, prompt="x" * 160)
        browser.until("document.querySelectorAll('#cache-events li[data-kind=stored]').length === 1")
        assert browser.text("#cache-events li span").startswith("stored 10 blocks, 160 tokens ")
        shows(browser, "cache-events-facts", "since the start")


# -- several models ------------------------------------------------------------------------------------------------


@slow
def test_of_several_models_one_is_chosen(browser: Browser) -> None:
    with serving(*TWO_MODELS) as several:
        browser.open(several.url)
        browser.live()
        browser.until("document.querySelectorAll('#models option').length === 2")
        assert browser.text("#model") == "one"
        assert httpx.post(f"{several.url}/models/load", json={"model": "two"}, timeout=60).status_code == 200
        browser.until("document.getElementById('models').textContent.includes('two · ready')")
        choose = "const box = document.getElementById('models'); box.value = 'two'"
        browser.js(f"{choose}; box.dispatchEvent(new Event('change'));")
        browser.until("document.getElementById('model').textContent === 'two'")
        assert browser.complaints() == []


@slow
def test_models_are_loaded_and_unloaded_and_share_one_budget(browser: Browser) -> None:
    with serving(*TWO_MODELS) as several:
        browser.open(several.url)
        browser.live()
        browser.until("document.querySelectorAll('#model-list tr').length === 2")
        press(browser, "#model-list", "two")
        browser.until("document.getElementById('connection').dataset.state === 'idle'")
        assert browser.text("#connection") == "two is not loaded"
        press(browser, "#model-list", "Load")
        browser.live()
        assert browser.text("#model") == "two"
        complete(several, prompt=LONG, model="two")
        kv = httpx.get(f"{several.url}/kv", params={"model": "two"}).json()["models"]
        assert [model["state"] for model in kv["models"]] == ["ready", "ready"]
        assert kv["budget_bytes"] == 4 << 20
        assert kv["taken_bytes"] == sum(model["fixed_bytes"] + model["kv_bytes"] for model in kv["models"]) > 0
        shows(browser, "models-facts", "of 4 MiB taken by weights and K/V")
        browser.until("document.querySelectorAll('#budget i').length >= 1")
        press(browser, "#model-list", "Unload")
        shows(browser, "model-list", "unloaded")
        assert browser.complaints() == []


def test_why_a_model_is_not_unloaded_is_said(browser: Browser) -> None:
    with serving(*TWO_MODELS, "backend.fake.latency_ms=10") as several:
        browser.open(several.url)
        browser.live()
        browser.until("document.querySelectorAll('#model-list tr').length === 2")
        body = {"prompt": "go on", "max_tokens": 3000, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{several.url}/v1/completions", json=body, timeout=60) as answer:
            pieces = answer.iter_bytes()
            assert next(pieces)
            press(browser, "#model-list", "Unload")
            shows(browser, "models-problem", "one")
            assert browser.find("#models-problem").is_displayed()


# -- several keys --------------------------------------------------------------------------------------------------


def test_who_is_not_the_operator_may_chat_and_is_asked_once(browser: Browser, tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    ann, _ = (add_key(file, name, None) for name in ("ann", "bob"))
    with serving(f"server.api_keys={file}", "server.api_key=sesame") as server:
        browser.open(server.url)
        browser.until("document.getElementById('key-dialog').open")
        assert not browser.find("#key-skip").is_displayed()
        browser.find("#key").send_keys(f"{ann}\n")
        shows(browser, "key-error", "operator's key (server.api_key)")
        browser.find("#key-skip").click()
        assert browser.text("#connection") == "needs the operator's key"
        browser.find("#max-tokens").clear()
        browser.find("#max-tokens").send_keys("5")
        browser.find("#prompt").send_keys("hello\n")
        browser.until("document.querySelector('.message.assistant small') !== null")
        assert "failed" not in browser.find(".message.assistant").get_attribute("class")
        asked = "performance.getEntriesByType('resource').filter((each) => each.name.includes('kv/stream')).length"
        assert browser.js(f"return {asked}") == 2
        assert browser.js("return document.getElementById('key-dialog').open") is False
        browser.find("#forget-key").click()
        browser.until("document.getElementById('key-dialog').open")
        browser.find("#key").send_keys("sesame\n")
        browser.live()
        assert browser.complaints(lambda message: "401" in message or "403" in message) == []
