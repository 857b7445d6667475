"""Observers of queries: metrics, traces, logs, and the live view."""
