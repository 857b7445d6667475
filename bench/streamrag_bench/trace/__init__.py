"""Workloads that are generated, and the statistics of traces."""
