"""vLLM for measurements: its own scheduler or ours, with a record of each step."""
