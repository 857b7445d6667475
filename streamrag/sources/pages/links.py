"""Links of a page in the order of what they promise for a query."""

import itertools
from collections.abc import Mapping
from urllib.parse import urlsplit

from streamrag.query.relevance import Stem, relevant_terms, terms

MAX_LINKS = 500
MAX_LINKS_CHARS = 50_000
"""Characters of all links together. Reading the answer must not hold up the caller's event loop."""


def rank_links(links: Mapping[str, str], query: str, stem: Stem, *, min_matches: int = 0) -> list[str]:
    """Return the addresses of `links` (texts by address), those with most terms of the query first."""
    wanted = set(relevant_terms(query, stem))
    num_matches = {
        address: len(wanted.intersection(terms(f"{text} {urlsplit(address).path}", stem)))
        for address, text in links.items()
    }
    ranked = sorted((each for each in links if num_matches[each] >= min_matches), key=lambda each: -num_matches[each])
    ends = itertools.accumulate(map(len, ranked))
    return [address for address, end in zip(ranked[:MAX_LINKS], ends, strict=False) if end <= MAX_LINKS_CHARS]
