"""Benchmarks: replay traced queries on a real or a simulated engine, and report the results."""
