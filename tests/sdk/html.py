"""What a document says, for the tests of what is shown in notebooks and on pages."""

from __future__ import annotations

from html.parser import HTMLParser


class Tags(HTMLParser):
    """Tags and attributes of a document, and its text outside of them."""

    def __init__(self, document: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.marked: list[str] = []
        self.text = ""
        self._open = ""
        self.feed(document)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        self._open = tag

    def handle_data(self, data: str) -> None:
        self.text += data
        if self._open == "mark":
            self.marked.append(data)

    def handle_endtag(self, tag: str) -> None:
        self._open = ""
