"""The part that runs in each of vLLM's workers: KV blocks are copied between the device and host memory."""
