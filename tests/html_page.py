"""A page of HTML as the tests look at it: its elements and its text, and whether it could run or load anything."""

from __future__ import annotations

import re
from html.parser import HTMLParser

VOID = {"meta", "link", "br", "img", "input", "hr", "circle", "rect", "path", "use"}


class Page(HTMLParser):
    """Every element with its attributes, the text of the page in order, and whether tags nest."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.open: list[str] = []
        self.faults: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if tag in VOID:
            return
        if not self.open or self.open.pop() != tag:
            self.faults.append(tag)

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] not in {"style", "title"}:
            self.texts.append(data)

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.texts))


def check_harmless(page: Page) -> None:
    """Fail where the page could run or load anything, or where its tags do not nest."""
    assert not page.faults
    assert not page.open
    tags = {tag for tag, _ in page.elements}
    assert not tags & {
        "script",
        "iframe",
        "object",
        "embed",
        "link",
        "base",
        "form",
        "img",
        "image",
        "foreignobject",
        "animate",
        "set",
        "audio",
        "video",
    }
    for tag, attributes in page.elements:
        for name, value in attributes.items():
            assert not name.startswith("on"), (tag, name)
            assert name not in {"src", "srcset", "action", "formaction", "background", "ping"}, (tag, name)
            if name in {"href", "xlink:href"}:
                assert re.match(r"#|runs/|server[\w-]*\.log$", value or ""), value
            if name == "style":
                assert "url(" not in (value or "")
