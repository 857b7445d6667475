"""For mkdocs: the pages beside docs/ that the documentation and the README link to, under names of the site."""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "experiments" / "results"
BESIDE = {f"{name.upper()}.md": f"{name}.md" for name in ("readme", "changelog", "contributing", "decisions")} | {
    "experiments/results/paper.md": "paper.md"
}
"""From a file's name in the repository to its name in the site."""
LINK = re.compile(r"\]\(([^)#]+)")
CODE = re.compile(r"`[^`\n]+`")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages; their links to docs/ are links within the site."""
    for name, page in BESIDE.items():
        text = (ROOT / name).read_text()
        linked = LINK.sub(lambda link: f"]({BESIDE.get(link[1], link[1].removeprefix('docs/'))}", text)
        files.append(File.generated(config, page, content=linked))
    for path in (*RESULTS.glob("*.json"), *RESULTS.glob("*.png"), *RESULTS.glob("paper/*.png")):
        name = path.relative_to(RESULTS).as_posix()
        files.append(File(name, str(RESULTS), config.site_dir, config.use_directory_urls))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Links from docs/ to a page beside it; bars in code, which only GitHub wants escaped in a table."""
    markdown = CODE.sub(lambda code: code[0].replace(r"\|", "|"), markdown)
    return LINK.sub(lambda link: f"]({BESIDE.get(link[1].removeprefix('../'), link[1])}", markdown)
