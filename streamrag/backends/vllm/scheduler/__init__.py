"""vLLM's scheduler, extended: what runs in the process of its engine.

scheduler                  one step: plan, evict, set aside
intake, request            chunks come in, and change the prompts of their requests
kv/                        KV memory on the device
host_memory/               KV memory of the host: which blocks are copied out and back, and what that costs
request_log, record_file   what a request went through, and the file for it
supported                  what engines and models the scheduler runs on
"""
