"""A mkdocs hook that adds pages from outside docs/, such as the README and the changelog, to the site."""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "experiments" / "results"
BESIDE = {f"{name.upper()}.md": f"{name}.md" for name in ("readme", "changelog", "contributing", "decisions")} | {
    "experiments/results/paper.md": "paper.md"
}
"""Names of the site's pages by file name in the repository."""
LINK = re.compile(r"\]\(([^)#]+)")
CODE = re.compile(r"`[^`\n]+`")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages, and turn their links to docs/ into links within the site."""
    for name, page in BESIDE.items():
        text = (ROOT / name).read_text()
        linked = LINK.sub(lambda link: f"]({BESIDE.get(link[1], link[1].removeprefix('docs/'))}", text)
        files.append(File.generated(config, page, content=linked))
    for path in (*RESULTS.glob("*.json"), *RESULTS.glob("*.png"), *RESULTS.glob("paper/*.png")):
        name = path.relative_to(RESULTS).as_posix()
        files.append(File(name, str(RESULTS), config.site_dir, config.use_directory_urls))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Turn links to files outside docs/ into links within the site, and unescape bars in code."""
    markdown = CODE.sub(lambda code: code[0].replace(r"\|", "|"), markdown)
    return LINK.sub(lambda link: f"]({BESIDE.get(link[1].removeprefix('../'), link[1])}", markdown)
