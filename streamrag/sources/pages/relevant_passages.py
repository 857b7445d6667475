"""Selection of the passages and links of a page that are relevant to a query, without repetitions of earlier pages.

    Markdown ──split_markdown──▶ passages ──select──▶ relevant ones, in page order ──assemble──▶ text of a chunk

`assemble` runs in the caller's process, which knows the earlier pages; everything else runs in a worker.
"""

import hashlib
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from urllib.parse import unquote, urlsplit

from streamrag.core.relevance import bm25, fitting
from streamrag.core.text import Stem, TextPassage, relevant_terms, terms, words

MAX_STEMS = 10_000  # distinct words of a page to stem: takes half a second, and is enough for a book
MIN_REPEATED_CHARS = 40  # shorter paragraphs ("Example:") may be repeated
MIN_NEWS_CHARS = 20  # shorter paragraphs alone are not worth a chunk: two pages may differ in a page number only
MIN_SCORE = 0.25  # share of the page's best score; below, passages share little more than a common word with the query
MAX_TERMS_REQUIRED = 3
MAX_LINKS = 500
MAX_LINKS_CHARS = 50_000  # characters of all links together, whose parsing must not block the caller's event loop


def relevant_stems(query: str, stem: Stem) -> Stem:
    """Return a cached `stem` that leaves words unchanged if they cannot have a stem in common with `query`.

    Stemming dominates the cost per word, and a page may have 100,000 distinct words. A stem begins like its word, but
    "y" may become "i" (dying, die). After `MAX_STEMS` words, all others stay unchanged.
    """
    stems: dict[str, str] = {}
    beginnings = {_beginning(term) for term in relevant_terms(query, stem)}

    def stem_if_relevant(word: str) -> str:
        if word in stems:
            return stems[word]
        if len(stems) == MAX_STEMS or not beginnings.intersection((_beginning(word), word[:1])):
            return word
        return stems.setdefault(word, stem(word))

    return stem_if_relevant


def _beginning(word: str) -> str:
    """Return the first two letters, which words and their stems share if "y" counts as "i"."""
    return word[:2].replace("y", "i")


def select(
    passages: Sequence[TextPassage], query: str, *, title: str, max_chars: int, stem: Stem = str
) -> list[TextPassage]:
    """Return the best passages for `query`, with at most `max_chars` together, in page order.

    A passage needs at least `MIN_SCORE` of the page's best score. Some passage, with its headings and the page's title,
    must have half of the query's terms (at most three); otherwise no passage is relevant. For a query without words,
    such as an emoji, return the page's beginning.
    """
    ranked: Sequence[int] = range(len(passages))
    if wanted := relevant_terms(query, stem):
        documents = [terms(" ".join((*passage.headings, *passage.blocks)), stem) for passage in passages]
        in_title = set(terms(title, stem))
        required = min(MAX_TERMS_REQUIRED, math.ceil(len(wanted) / 2))
        coverage = (sum(term in document or term in in_title for term in wanted) for document in map(set, documents))
        if max(coverage, default=0) < required:
            return []
        scores = bm25(documents, wanted)
        least = MIN_SCORE * max(scores)
        ranked = sorted((i for i in ranked if 0 < scores[i] >= least), key=lambda i: -scores[i])
    return [passages[i] for i in sorted(fitting(passages, ranked, max_chars))]


def rank_links(links: Mapping[str, str], query: str, stem: Stem, *, min_matches: int = 0) -> list[str]:
    """Return the URLs of `links` (texts by URL), most query terms first, up to `MAX_LINKS` and `MAX_LINKS_CHARS`.

    min_matches: least number of terms in a link's text and path.
    """
    wanted = set(relevant_terms(query, stem))
    num_matches = {
        url: len(wanted.intersection(terms(f"{text} {unquote(urlsplit(url).path)}", stem)))
        for url, text in links.items()
    }
    ranked = sorted((url for url in links if num_matches[url] >= min_matches), key=lambda url: -num_matches[url])
    ends = itertools.accumulate(map(len, ranked))
    return [url for url, end in zip(ranked[:MAX_LINKS], ends, strict=False) if end <= MAX_LINKS_CHARS]


def assemble(
    passages: Iterable[TextPassage], seen: set[bytes], is_known: Callable[[str], bool] = lambda block: False
) -> str:
    """Join `passages` under their innermost headings without repeated long blocks; return "" if too little is new.

    Too little is no new block, or only new ones under `MIN_NEWS_CHARS` although `passages` have longer ones.

    seen: fingerprints of earlier blocks, to which all blocks are added. A fingerprint ignores case and punctuation.
    is_known: whether a block that is not in `seen` is nevertheless a repetition.
    """
    text: list[str] = []
    heading = ""
    has_any = has_news = could_have_news = False
    for passage in passages:
        blocks: list[str] = []
        for block in passage.blocks:
            text_of_words = " ".join(words(block))
            fingerprint = hashlib.blake2b(text_of_words.encode(errors="replace"), digest_size=16).digest()
            is_new = fingerprint not in seen and not is_known(block)
            seen.add(fingerprint)
            if is_new or len(text_of_words) < MIN_REPEATED_CHARS:
                blocks.append(block)
            has_news |= is_new and len(text_of_words) >= MIN_NEWS_CHARS
            could_have_news |= len(text_of_words) >= MIN_NEWS_CHARS
            has_any |= is_new
        if blocks and passage.headings and passage.headings[-1] != heading:
            heading = passage.headings[-1]
            text.append(heading)
        text += blocks
    return "\n\n".join(text) if has_news or (has_any and not could_have_news) else ""
