"""Looking at pages: their outline, names that would do harm if they were not text, and a browser.

The browser needs Debian's chromium and chromium-driver; where one of them is missing the tests are skipped, and with
SPIRITLEVEL_REQUIRE_BROWSER=1 they fail instead. Selenium and axe-core-python come from PyPI with everything else.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from html.parser import HTMLParser
from typing import Any

import pytest

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--hide-scrollbars",
    "--host-resolver-rules=MAP * ~NOTFOUND",
)  # fmt: skip
HOSTILE = ('<img src=x onerror=alert(1)>', '</script><script>alert(2)</script>', '"><svg onload=alert(3)>', "{{ 7*7 }}",
           "javascript:alert(4)", "</style><b>", "--><i>", "a\x00b\x1bc\u202e")  # fmt: skip


class Outline(HTMLParser):
    """Elements with their attributes, and the text of the page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


def _missing() -> str:
    return ", ".join(name for name in ("chromium", "chromedriver") if shutil.which(name) is None)


@pytest.fixture(scope="module", name="browser")
def started_browser() -> Iterator[Any]:
    if missing := _missing():
        if os.environ.get("SPIRITLEVEL_REQUIRE_BROWSER") == "1":
            pytest.fail(f"a browser is required here, and there is no {missing}")
        pytest.skip(f"no browser: {missing}")
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = str(shutil.which("chromium"))
    for flag in FLAGS:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(str(shutil.which("chromedriver"))))
    driver.set_page_load_timeout(300)
    driver.set_script_timeout(300)
    yield driver
    driver.quit()


def visit(browser: Any, address: str, width: int = 1280, scheme: str = "light", media: str = "screen") -> None:
    """Open a page on a screen of that width for a reader who prefers that scheme."""
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": media, "features": features})
    screen = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    browser.get_log("browser"), browser.get_log("performance")
    browser.get(address)


def requests(browser: Any) -> list[str]:
    """The addresses asked for since the last visit, the page itself left out."""
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    sent = [event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"]
    return [url for url in sent if not url.startswith(("file:", "data:,"))]
