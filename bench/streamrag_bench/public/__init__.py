"""The public benchmark of streamed input: statistics.json ─▶ workload ─▶ engines, server ─▶ results ─▶ page."""
