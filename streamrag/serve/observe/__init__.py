"""Observers of queries: metrics, traces, logs, the live view."""
