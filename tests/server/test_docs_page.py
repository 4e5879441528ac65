"""`/docs`: without the internet, behind a key, and under a sub-path, in a real browser."""

from __future__ import annotations

import httpx
import pytest

from browser_kit import Browser, needs_browser
from http_kit import client_for, config_with
from scripted_llm import ScriptedLLM
from server_process import serving


async def test_the_page_needs_no_key_and_the_description_does() -> None:
    async with client_for(ScriptedLLM(config_with(api_key="sesame"))) as client:
        for path in ("/docs", "/docs/docs.js", "/docs/docs.css"):
            page = await client.get(path)
            assert page.status_code == 200
            assert "http://" not in page.text and "https://" not in page.text
            assert "default-src 'none'" in page.headers["content-security-policy"]
        assert (await client.get("/docs/icon.svg")).status_code == 200
        assert (await client.get("/openapi.json")).status_code == 401
        assert (await client.get("/redoc")).status_code == 401


@pytest.mark.parametrize("prefix", ["/llm", "/a/b"])
async def test_a_sub_path_is_taken_off_whether_the_proxy_does_it_or_not(prefix: str) -> None:
    async with client_for(ScriptedLLM(config_with(root_path=prefix))) as client:
        for path in ("/health", f"{prefix}/health", f"{prefix}/docs", f"{prefix}/v1/models"):
            assert (await client.get(path)).status_code == 200, path
        assert (await client.get(f"{prefix}x/health")).status_code == 404
        page = await client.get(prefix)
        assert (page.status_code, page.headers["location"]) == (307, f"{prefix}/")
        assert (await client.get("/openapi.json")).json()["servers"] == [{"url": prefix}]
        answer = await client.post(f"{prefix}/v1/completions", json={"prompt": "hi"})
        assert answer.status_code == 200


async def test_a_key_is_needed_under_a_sub_path_as_well() -> None:
    async with client_for(ScriptedLLM(config_with(root_path="/llm", api_key="sesame"))) as client:
        assert (await client.get("/llm/v1/models")).status_code == 401
        assert (await client.get("/llm/kv")).status_code == 401
        assert (await client.get("/llm/health")).status_code == 200


@needs_browser
@pytest.mark.parametrize("prefix", ["", "/llm"])
def test_the_description_is_shown_and_can_be_tried(browser: Browser, prefix: str) -> None:
    with serving("server.api_key=sesame", f"server.root_path={prefix}") as server:
        browser.open(f"{server.url}{prefix}/docs")
        browser.until("!document.getElementById('key-form').hidden")
        for key in ("wrong", "sesame"):
            browser.js("document.getElementById('key').value = arguments[0]", key)
            browser.js("document.querySelector('#key-form button').click()")
            if key == "wrong":
                browser.until("document.getElementById('key-error').textContent.includes('does not take')")
        browser.until("document.getElementById('post /v1/completions')")
        assert "cLLM" in browser.text("#title")
        described = set(httpx.get(f"{server.url}/openapi.json", headers=KEY).json()["paths"])
        shown = browser.js("return [...document.querySelectorAll('summary code')].map((each) => each.textContent)")
        assert set(shown) == described
        browser.js("""
            const place = document.getElementById("post /v1/completions");
            place.open = true;
            place.querySelector("button").click();
        """)
        browser.until("document.getElementById('post /v1/completions').querySelector('pre').textContent.length > 20")
        answer = browser.js("return document.getElementById('post /v1/completions').querySelector('pre').textContent")
        assert answer.startswith("200\n") and '"text_completion"' in answer
        browser.js("sessionStorage.clear()")
        assert not browser.complaints(lambda message: "401" in message or "favicon" in message)


KEY = {"authorization": "Bearer sesame"}
