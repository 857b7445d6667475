"""What runs in each of vLLM's workers."""
