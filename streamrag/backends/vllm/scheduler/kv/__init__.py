"""KV memory on the device.

memory        vLLM's KV cache as a plan sees it
replacement   prompts that change, and what of their KV is kept
later_hits    blocks that others have computed since a request began
eviction      taking KV from requests, and what becomes of it
claims        KV blocks that complete prompts and their answers may come to need
"""
