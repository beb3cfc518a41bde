"""Read an HTML page as a browser does."""

from __future__ import annotations

import re
from html.parser import HTMLParser

from titan.report.render.document import POLICY

VOID = {"meta", "br", "link", "img"}


class PageReader(HTMLParser):
    """What a page has: elements that are open, all attributes, and its text without styles and script."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not {"style", "script"} & set(self.open):
            self.text += data

    def list_values(self, name: str) -> list[str]:
        return [value for key, value in self.attributes if key == name]


def read_whole(text: str) -> PageReader:
    """Return a page that is whole, loads nothing, and has numbers wherever it draws."""
    read, without_script = PageReader(text), re.sub(r"<script>.*?</script>", "", text, flags=re.S)
    assert read.open == [] and not read.list_values("src") and not read.list_values("href")
    assert not re.search(r"https?:|@import|//[a-z]", without_script)
    assert all(reference.startswith("#") for reference in re.findall(r"url\(([^)]*)\)", text))
    assert len(read.list_values("id")) == len(set(read.list_values("id")))
    assert any(value.startswith(POLICY) for value in read.list_values("content"))
    drawn = [value for name in ("points", "d", "width", "x") for value in read.list_values(name)]
    assert "nan" not in " ".join(drawn).lower()
    return read
