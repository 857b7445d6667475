"""Writes the tables of docs/serve-settings.md and docs/serve-limits.md from the settings of the service."""

import re
import sys
from pathlib import Path

from streamrag.serve.config.layers import SECTIONS
from streamrag.serve.config.settings import toml_of

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "docs" / name for name in ("serve-settings.md", "serve-limits.md")]


def updated(page: str) -> str:
    """Return the page with the rows of each section's table as its settings are now."""
    for section, model in SECTIONS.items():
        values = model()
        rows = "".join(
            f"| `{name}` | {'' if (value := getattr(values, name)) is None else f'`{toml_of(value)}`'} "
            f"| {field.description} |\n"
            for name, field in model.model_fields.items()
        )
        table = rf"(\n## `\[{section}\]`\n(?:[^#\n].*\n|\n)*?\| --- .*\n)(?:\| `.*\n)*"
        page = re.sub(table, lambda match, rows=rows: match[1] + rows, page)  # type: ignore[misc]
    return page


def main() -> int:
    for path in PAGES:
        path.write_text(updated(path.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
