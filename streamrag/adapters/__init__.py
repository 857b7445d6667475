"""Adapters for other frameworks: streamrag as their component, and their retrievers as sources. Each has an extra.

No other part of streamrag imports this package.
"""
