"""Markdown and title of a pruned page, by crawl4ai."""

from crawl4ai import CrawlerRunConfig, DefaultMarkdownGenerator, LXMLWebScrapingStrategy, NoTableExtraction

MAX_TITLE_CHARS = 300

SCRAPER = LXMLWebScrapingStrategy()
OPTIONS = {**vars(CrawlerRunConfig(table_extraction=NoTableExtraction())), "url": ""}
GENERATOR = DefaultMarkdownGenerator(
    options={
        **dict.fromkeys(("ignore_links", "ignore_images", "ignore_emphasis"), True),
        "body_width": 0,
        "single_line_break": False,
    }
)
ERRORS = ("Error converting HTML to markdown:", "Error in markdown generation:")
"""Beginnings of what crawl4ai gives in place of text when it fails."""


def to_markdown(url: str, html: str) -> tuple[str, str]:
    """Return the title and the text of a pruned page.

    :raises ValueError: crawl4ai cannot parse it.
    """
    scraped = SCRAPER.scrap(html=html, **{**OPTIONS, "url": url})
    if not scraped.success:
        raise ValueError("crawl4ai cannot parse it")
    text = GENERATOR.generate_markdown(scraped.cleaned_html, base_url=url, citations=False).raw_markdown
    if text.startswith(ERRORS):
        raise ValueError(text)
    return clean_title(scraped.metadata.get("title") or ""), text


def clean_title(title: str) -> str:
    """Return the beginning of a title, on one line."""
    return " ".join(title.split())[:MAX_TITLE_CHARS]
