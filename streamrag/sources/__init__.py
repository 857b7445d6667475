"""Retrievers as streams of chunk events."""
