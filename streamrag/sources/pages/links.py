"""Which links of a page are worth following for a query: the inside of a crawl worker."""

import itertools
from collections.abc import Mapping
from urllib.parse import urlsplit

from streamrag.choice import Stem, relevant_terms, terms

MAX_LINKS = 500
MAX_LINKS_CHARS = 50_000
"""Characters of all links together. Reading the answer must not hold up the caller's event loop."""


def most_promising(found: Mapping[str, str], query: str, stem: Stem, *, least: int = 0) -> list[str]:
    """The links, those first whose text or path has the most of the query's terms; `least` of them at least."""
    wanted = set(relevant_terms(query, stem))

    def num_matches(address: str, text: str) -> int:
        return len(wanted.intersection(terms(f"{text} {urlsplit(address).path}", stem)))

    counted = [(num_matches(*link), link[0]) for link in found.items()]
    counted.sort(key=lambda each: -each[0])
    links = [address for number, address in counted if number >= least]
    ends = itertools.accumulate(map(len, links))
    return [address for address, end in zip(links[:MAX_LINKS], ends, strict=False) if end <= MAX_LINKS_CHARS]
