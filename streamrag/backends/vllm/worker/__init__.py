"""The part that runs in each of vLLM's workers: copies KV blocks between the device and host memory."""
