"""Which links of a page are worth following for a query: the inside of a crawl worker."""

import itertools
from collections.abc import Mapping
from urllib.parse import urlsplit

from streamrag.sources.relevance import Stem, relevant_terms, terms

MAX_LINKS = 500
MAX_LINKS_CHARS = 50_000
"""Characters of all links together. Reading the answer must not hold up the caller's event loop."""


def most_promising(found: Mapping[str, str], query: str, stem: Stem) -> list[str]:
    """The links, those first whose text or path has the most of the query's terms."""
    wanted = set(relevant_terms(query, stem))

    def num_matches(link: tuple[str, str]) -> int:
        address, text = link
        return len(wanted.intersection(terms(f"{text} {urlsplit(address).path}", stem)))

    links = [address for address, _ in sorted(found.items(), key=num_matches, reverse=True)]
    ends = itertools.accumulate(map(len, links))
    return [address for address, end in zip(links[:MAX_LINKS], ends, strict=False) if end <= MAX_LINKS_CHARS]
