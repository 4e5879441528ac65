"""A real Chromium for tests of the page: Debian's, headless, driven by selenium."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")

needs_browser = pytest.mark.skipif(
    CHROMIUM is None or DRIVER is None,
    reason="chromium and chromedriver are not installed (apt-get install chromium chromium-driver)",
)


class Browser:
    """A page in a window, and what tests ask it."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(self, url: str) -> None:
        self.driver.get(url)

    def js(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def text(self, selector: str) -> str:
        text: str = self.js("return document.querySelector(arguments[0]).textContent", selector)
        return text

    def find(self, selector: str) -> Any:
        return self.driver.find_element("css selector", selector)

    def until(self, script: str, seconds: float = 30.0) -> Any:
        """Wait until this JavaScript expression is true; its value."""
        from selenium.webdriver.support.ui import WebDriverWait

        return WebDriverWait(self.driver, seconds, 0.05).until(lambda _: self.js(f"return {script}"), script)

    def live(self) -> None:
        self.until("document.getElementById('connection').dataset.state === 'live'")

    def complaints(self, allowed: Callable[[str], bool] = lambda _: False) -> list[str]:
        """Everything that the console said since this was asked last: errors, and what the policy forbade."""
        return [entry["message"] for entry in self.driver.get_log("browser") if not allowed(entry["message"])]

    def emulate(self, **features: str) -> None:
        """Media features, such as prefers_color_scheme="dark"."""
        values = [{"name": name.replace("_", "-"), "value": value} for name, value in features.items()]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": values})

    def size(self, width: int, height: int, scale: float = 1.0, *, mobile: bool = False) -> None:
        metrics = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": mobile}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


@contextmanager
def browsing(width: int = 1280, height: int = 900) -> Iterator[Browser]:
    from selenium.webdriver import Chrome, ChromeOptions, ChromeService

    options = ChromeOptions()
    options.binary_location = CHROMIUM or ""
    for argument in ("--headless=new", "--disable-gpu", "--disable-dev-shm-usage", f"--window-size={width},{height}"):
        options.add_argument(argument)
    if os.geteuid() == 0:
        options.add_argument("--no-sandbox")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = Chrome(options=options, service=ChromeService(executable_path=DRIVER))
    try:
        driver.set_script_timeout(60)
        yield Browser(driver)
    finally:
        driver.quit()
