"""KV memory on the device.

memory        vLLM's KV cache, as the planner sees it
replacement   replace the prompt of a request and keep its valid KV
later_hits    prefix hits for requests that already hold KV
eviction      take KV from requests
claims        the KV budget of complete prompts and their answers
"""
