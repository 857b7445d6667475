"""For mkdocs: pages that stand beside docs/ become pages of the site, and links to them follow."""

import posixpath
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "experiments" / "results"
STUDIES = ROOT / "experiments" / "studies"
BESIDE: Mapping[str, str] = {
    **{f"{name.upper()}.md": f"{name}.md" for name in ("readme", "changelog", "contributing")},
    **{
        f"experiments/studies/{path.name}": f"studies/{path.name}"
        for path in (ROOT / "experiments/studies").glob("*.md")
    },
    "experiments/results/paper.md": "paper.md",
}
"""From a page's path in the repository to its path in the site."""
LINK = re.compile(r"\]\(([^)#:]+)")
CODE = re.compile(r"`[^`\n]+`")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that stand beside docs/, and the pictures and data of results."""
    for name, page in BESIDE.items():
        files.append(File.generated(config, page, content=relink((ROOT / name).read_text(), name, page)))
    for path in (*RESULTS.glob("*.json"), *RESULTS.glob("*.png"), *RESULTS.glob("paper/*.png")):
        name = path.relative_to(RESULTS).as_posix()
        files.append(File(name, str(RESULTS), config.site_dir, config.use_directory_urls))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Rewrite links to pages beside docs/, and unescape bars in code, which only GitHub wants escaped in a table."""
    markdown = CODE.sub(lambda code: code[0].replace(r"\|", "|"), markdown)
    name = page.file.src_uri
    return markdown if name in BESIDE.values() else relink(markdown, f"docs/{name}", name)


def relink(markdown: str, name: str, page: str) -> str:
    """Return the text of the file `name` with links as they are in the site, where it is at `page`."""

    def link(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(name), match[1]))
        if target in BESIDE:
            target = BESIDE[target]
        elif target.startswith("docs/"):
            target = target.removeprefix("docs/")
        else:
            return match[0]
        return f"]({posixpath.relpath(target, posixpath.dirname(page) or '.')}"

    return LINK.sub(link, markdown)
