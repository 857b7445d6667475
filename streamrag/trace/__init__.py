"""Traces of retrieval: recorded, read, generated, replayed."""
