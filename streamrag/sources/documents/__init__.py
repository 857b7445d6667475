"""The text of documents: HTML, Markdown, PDF and plain text, as Markdown."""
