"""The content of pages: text, links, relevant passages, near-duplicates."""
