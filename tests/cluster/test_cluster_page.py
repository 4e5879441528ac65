"""The page of a cluster in a real browser."""

from __future__ import annotations

import asyncio

from browser_kit import browsing, needs_browser
from cllm.config import Config
from cllm.engine.submission import Submission
from cllm.kv.pins import PinMark
from cllm.llm import ONE_TOKEN
from cluster_kit import LocalCluster
from http_kit import served

CONFIG = {"backend": {"type": "fake"}, "model": {"alias": "tiny"}}


@needs_browser
async def test_the_page_shows_each_replica_instead_of_a_map() -> None:
    async with LocalCluster(Config.model_validate(CONFIG), replicas=2) as llm, served(llm) as app:
        prompt = llm.text.tokenizer.encode("It was the best of times, it was the worst of times.")
        await llm.warm(Submission(prompt, ONE_TOKEN, pins=[PinMark(len(prompt))]))
        await llm.caught_up()
        names = sorted(llm.local.names)

        def look() -> tuple[list[list[str]], list[bool], str, list[str]]:
            with browsing() as browser:
                browser.open(app.url)
                browser.live()
                browser.until("document.querySelectorAll('#replica-list tr').length === 2")
                browser.until("document.querySelectorAll('#pins tr').length === 1")
                rows = browser.js(
                    "return [...document.querySelectorAll('#replica-list tr')]"
                    ".map((row) => [...row.cells].map((cell) => cell.textContent.trim()))"
                )
                shown = browser.js(
                    "return ['.map', '.tree', '.replicas', '.requests']"
                    ".map((each) => document.querySelector(each).checkVisibility())"
                )
                return rows, shown, browser.text("#pins td"), browser.complaints()

        rows, shown, pin, complaints = await asyncio.to_thread(look)
    assert [row[:3] for row in rows] == [[name, "127.0.0.1", "running"] for name in names]
    assert all(row[3] == row[4] == "0" for row in rows)
    assert shown == [False, False, True, True]
    assert pin == "on 2 replicas"
    assert complaints == []
