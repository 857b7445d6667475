"""vLLM's scheduler, extended: what runs in the process of its engine."""
