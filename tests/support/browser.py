"""A headless Chromium that looks at a page: at any width, in the light and in the dark."""

import json
import shutil

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service

from tests.cluster.fixture import leave_out

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
BROWSERS_OWN = ("chrome:", "chrome-untrusted:", "chrome-search:", "chrome-extension:", "devtools:")

OVERFLOWING = """
const wide = [...document.querySelectorAll("main *")].filter(
  (node) => !node.closest(".scroll, pre, svg") && node.getBoundingClientRect().right > innerWidth + 1
    || node.matches(".figures dd") && node.scrollWidth > node.clientWidth
);
return [document.documentElement.scrollWidth > innerWidth, wide.map((node) => node.outerHTML.slice(0, 80))];
"""

FAINT = """
const parse = (text) => {
  const numbers = text.match(/[\\d.]+/g).map(Number);
  const scale = text.startsWith("color(") ? 255 : 1;
  return [...numbers.slice(0, 3).map((n) => n * scale), numbers[3] ?? 1];
};
const light = ([r, g, b]) => {
  const [x, y, z] = [r, g, b].map((n) => n / 255).map((n) => (n <= 0.03928 ? n / 12.92 : ((n + 0.055) / 1.055) ** 2.4));
  return 0.2126 * x + 0.7152 * y + 0.0722 * z;
};
const behind = (node) => {
  for (; node; node = node.parentElement) {
    const colour = parse(getComputedStyle(node).backgroundColor);
    if (colour[3] > 0.99) return colour;
  }
  return [255, 255, 255];
};
const found = [];
const walker = document.createTreeWalker(document.querySelector("main"), NodeFilter.SHOW_TEXT);
while (walker.nextNode()) {
  const node = walker.currentNode.parentElement;
  if (!walker.currentNode.data.trim() || ["SCRIPT", "STYLE", "title"].includes(node.tagName)) continue;
  const box = node.getBoundingClientRect();
  if (!box.width || !box.height) continue;
  const style = getComputedStyle(node);
  const ink = parse(node.namespaceURI.endsWith("svg") ? style.fill : style.color);
  const [a, b] = [light(ink), light(behind(node))].sort((x, y) => y - x);
  const ratio = (a + 0.05) / (b + 0.05);
  if (ratio < 4.5) found.push([walker.currentNode.data.trim().slice(0, 40), ratio.toFixed(2)]);
}
return found;
"""


class Page:
    """A page in the browser."""

    def __init__(self, driver):
        self.driver = driver

    def open(self, path, width=1400, scheme="light"):
        """Show a file at a width in CSS pixels, in that colour scheme."""
        driver = self.driver
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 700}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        for kind in ("browser", "performance"):
            driver.get_log(kind)
        driver.get(path.resolve().as_uri())
        driver.execute_script("for (const part of document.querySelectorAll('details')) part.open = true;")

    def complaints(self):
        """The messages in the console since the page was opened."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def requests(self):
        """The requests besides that for the page; the browser's own pages, such as its first tab, do not count."""
        events = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        sent = [event["params"] for event in events if event["method"] == "Network.requestWillBeSent"]
        urls = [one["request"]["url"] for one in sent if not one["documentURL"].startswith(BROWSERS_OWN)]
        return [url for url in urls if not url.startswith(("file:", "data:", *BROWSERS_OWN))]

    def overflow(self):
        """Whether the page is too wide, and which elements are."""
        return self.driver.execute_script(OVERFLOWING)

    def faint(self):
        """Texts whose contrast to their background is less than 4.5, with the contrast."""
        return self.driver.execute_script(FAINT)

    def text(self):
        """The visible text."""
        return self.driver.execute_script("return document.querySelector('main').innerText")

    def figures(self):
        """The numbers on the page by their key in the report."""
        code = "return [...document.querySelectorAll('[data-key]')].map((one) => [one.dataset.key, one.value])"
        return dict(self.driver.execute_script(code))


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    """A Page in its own browser."""
    binary = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    driver = shutil.which("chromedriver")
    if binary is None or driver is None:
        leave_out("no chromium and chromedriver on the PATH; on Debian: tests/install_browser.sh")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('browser')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    started = webdriver.Chrome(options=options, service=Service(driver))
    started.get("about:blank")  # its first tab goes on asking for parts of itself, and is gone by this
    yield Page(started)
    started.quit()
