"""A source of text that a model or a tool is still writing."""
