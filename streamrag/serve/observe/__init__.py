"""Who watches: metrics, traces, logs, the live view."""
