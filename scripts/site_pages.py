"""For mkdocs: pages that stand beside docs/ become pages of the site, and links to them follow.

Run as a program, it writes the list of all pages in docs/index.md, from the navigation in mkdocs.yml.
"""

import posixpath
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from mkdocs.utils.yaml import yaml_load

ROOT = Path(__file__).resolve().parent.parent
STUDIES = ROOT / "bench" / "studies"
BESIDE: Mapping[str, str] = {
    **{f"{name.upper()}.md": f"{name}.md" for name in ("readme", "changelog", "contributing")},
    **{
        f"bench/studies/{path.parent.name}/README.md": f"studies/{path.parent.name}/README.md"
        for path in STUDIES.glob("*/README.md")
    },
}
"""From a page's path in the repository to its path in the site."""
LINK = re.compile(r"\]\(([^)#:]+)")
WHOLE_LINK = re.compile(r"\[([^]]+)\]\([^)]+\)")
SENTENCE = re.compile(r"^(?!#|<!--|>)(\S.*?)(?:\.\s|(?<=\?)\s|:\n\n)", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`[^`\n]+`")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that stand beside docs/, and the pictures and results of studies."""
    for name, page in BESIDE.items():
        files.append(File.generated(config, page, content=relink((ROOT / name).read_text(), name, page)))
    for path in (*STUDIES.glob("*/*.json"), *STUDIES.glob("*/*.png"), *STUDIES.glob("*/pictures/*.png")):
        name = path.relative_to(STUDIES.parent).as_posix()
        files.append(File(name, str(STUDIES.parent), config.site_dir, config.use_directory_urls))
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


def indexed(page: str, navigation: Sequence[Any]) -> str:
    """Return the text of docs/index.md: its own first lines, then a section for each of the navigation."""
    lines = [page.partition("\n## ")[0].rstrip()]
    for title, pages in ((title, pages) for entry in navigation for title, pages in entry.items()):
        if isinstance(pages, list):
            lines += [f"\n## {title}\n", *listed(pages)]
    return "\n".join(lines) + "\n"


def listed(entries: Sequence[Any], indent: str = "") -> Iterator[str]:
    """Yield lines of a part of the navigation: a page with its first sentence, a study or a folder's page by title."""
    for entry in entries:
        name, page = ("", entry) if isinstance(entry, str) else next(iter(entry.items()))
        if isinstance(page, str) and page.startswith("studies/"):  # its title is its question
            yield f"{indent}- {link_to(page)}"
        elif not isinstance(page, list):
            yield f"{indent}- {link_to(page)}: {about(source_of(page).read_text())}"
        elif all("/" in inner for inner in page):
            yield f"{indent}- {name}: {', '.join(map(link_to, page))}."
        else:
            yield f"{indent}- {name}"
            yield from listed(page, indent + "    ")


def source_of(page: str) -> Path:
    """Return the file of a page of the site."""
    return ROOT / next((name for name, target in BESIDE.items() if target == page), f"docs/{page}")


def link_to(page: str) -> str:
    """Return a link from docs/ to the page, with its title."""
    path = source_of(page)
    title = path.read_text().partition("\n")[0].removeprefix("# ")
    return f"[{title}]({posixpath.relpath(str(path), str(ROOT / 'docs'))})"


def about(text: str) -> str:
    """Return the first sentence of a page, which says what it is, without links."""
    sentence = SENTENCE.search(text)
    assert sentence is not None
    words = WHOLE_LINK.sub(r"\1", " ".join(sentence[1].split())).replace("**", "")
    words = re.sub(r"^This page (says |is )?", "", words)
    return f"{words[0].upper()}{words[1:]}{'' if words.endswith('?') else '.'}"


def main() -> int:
    page = ROOT / "docs" / "index.md"
    page.write_text(indexed(page.read_text(), yaml_load((ROOT / "mkdocs.yml").read_text())["nav"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
