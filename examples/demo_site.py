"""A documentation site on loopback: Markdown as HTML with real links, served with the latency of a real one.

Run as a program it serves a folder, and prints its port first: `python demo_site.py FOLDER`.
"""

import ctypes
import math
import random
import re
import signal
import sys
import time
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title></head>
<body><nav>{links}</nav><main>{body}</main><footer>The documentation of streamrag.</footer></body></html>
"""

MEDIAN_LATENCY_S, LATENCY_SPREAD, MAX_LATENCY_S = 0.35, 0.5, 1.0
"""Log-normal; each page keeps its own latency from request to request, so that paired runs are comparable."""

PR_SET_PDEATHSIG = 1
"""Source: prctl(2)."""

LINK = re.compile(r'<a href="([^"#]*)([^"]*)">(.*?)</a>', re.DOTALL)


def written_pages(docs: Path) -> list[Path]:
    """The Markdown files in `docs`, without the reference that is made from docstrings."""
    return [page for page in sorted(docs.glob("*.md")) if page.name != "api.md"]


def build_site(docs: Path, site: Path) -> int:
    """Write an HTML page for each Markdown file in `docs` that a person wrote; returns how many."""
    from markdown_it import MarkdownIt

    site.mkdir(parents=True, exist_ok=True)
    render = MarkdownIt("commonmark").enable("table").render
    pages = written_pages(docs)
    links = " ".join(f'<a href="{page.stem}.html">{page.stem}</a>' for page in pages)
    for page in pages:
        text = page.read_text()
        title = text.splitlines()[0].lstrip("# ")
        body = LINK.sub(lambda link: _kept(link, docs), render(text))
        (site / f"{page.stem}.html").write_text(PAGE.format(title=title, links=links, body=body))
    return len(pages)


def _kept(link: re.Match[str], docs: Path) -> str:
    """A link to a page of the site, or to elsewhere on the web; of one to a file beside the site, only the words."""
    file, place, words = link.groups()
    if "://" in file or not file:
        return link[0]
    return f'<a href="{file.removesuffix(".md")}.html{place}">{words}</a>' if (docs / file).parent == docs else words


class SlowHandler(SimpleHTTPRequestHandler):
    """Serves files after each one's own latency."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        latency_s = random.Random(self.path).lognormvariate(math.log(MEDIAN_LATENCY_S), LATENCY_SPREAD)
        time.sleep(min(latency_s, MAX_LATENCY_S))
        super().do_GET()

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing: the crawler's side is the interesting one."""


def main() -> None:
    ctypes.CDLL(None).prctl(
        PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0
    )  # a demo that is killed leaves nothing behind
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(SlowHandler, directory=sys.argv[1]))
    print(server.server_port, flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
