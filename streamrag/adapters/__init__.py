"""Adapters for other frameworks, with a module and an extra for each: streamrag in them, and their retrievers as sources.

No other part of streamrag imports this package.
"""
