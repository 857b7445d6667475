"""What cleaning makes of a page, whatever the query is: what a worker keeps on disk for the next one."""

import functools
import json
from dataclasses import asdict, dataclass
from importlib.metadata import version

from streamrag.versions import __version__


@dataclass(frozen=True, slots=True)
class Cleaned:
    """A page without what is not content."""

    url: str
    """Where a browser was led to, or where it was fetched from."""
    title: str
    text: str
    """Markdown, or plain text."""
    links: dict[str, str]
    """From address to text."""
    is_cut: bool
    """Whether the page is larger than what is looked at."""

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, encoded: bytes) -> "Cleaned":
        """:raises ValueError: these are none."""
        try:
            fields = json.loads(encoded)
            cleaned = cls(**fields)
        except (TypeError, RecursionError) as error:
            raise ValueError(str(error)) from error
        if not isinstance(cleaned.links, dict):
            raise ValueError("its links are no addresses with texts")
        texts = (cleaned.url, cleaned.title, cleaned.text, *cleaned.links, *cleaned.links.values())
        if not all(isinstance(text, str) for text in texts):
            raise ValueError("its fields have other types")
        return cleaned


@functools.cache
def cleaned_by() -> str:
    """What cleans pages: what another version has made of them is not used."""
    return f"cleaned 1 streamrag {__version__} crawl4ai {version('crawl4ai')} pypdf {version('pypdf')}"
