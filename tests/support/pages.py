"""For tests of HTML pages: what a page holds, and what it shows in a browser."""

import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no Chromium on PATH to open the page with")


class Page(HTMLParser):
    """A page that asks for nothing from elsewhere and whose tags are balanced.

    Attributes:
        text: the whole file.
        references: all addresses in the page.
        alts: the words of all images.
        marks: title and text of all marked words.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.text = path.read_text(encoding="utf-8")
        self.open: list[str] = []
        self.references: list[str] = []
        self.alts: list[str] = []
        self.marks: list[tuple[str, str]] = []
        self.feed(self.text)
        assert self.open == []
        assert self.references
        assert all(reference.startswith("data:") for reference in self.references)
        assert not re.search(r"https?://|@import|url\(", self.text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag not in ("meta", "link", "img", "input"):
            self.open.append(tag)
        self.references += [values[name] or "" for name in ("src", "href") if name in values]
        if tag == "img":
            self.alts.append(values.get("alt") or "")
        if tag == "mark":
            self.marks.append((values.get("title") or "", ""))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "mark":
            self.marks[-1] = (self.marks[-1][0], data)


def title_after(script: str, path: Path, is_dark: bool) -> list[str]:
    """What `script` joins by "|" and writes into the page's title, in a browser that may reach nothing."""
    page = path.with_name(f"{path.stem}_{is_dark}.html")
    text = path.read_text(encoding="utf-8").replace("</body>", f"<script>{script}</script></body>")
    page.write_text(text, encoding="utf-8")
    command = [
        str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
        "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
        "--virtual-time-budget=2000", f"--user-data-dir={path.parent / 'profile'}",
        f"--blink-settings=preferredColorScheme={int(not is_dark)}", "--dump-dom", page.as_uri(),
    ]  # fmt: skip
    shown = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
    return re.findall(r"<title>(.*?)</title>", shown, re.DOTALL)[0].split("|")
