"""vLLM's scheduler, extended: what runs in the process of its engine.

scheduler                       one step: plan, evict, set aside
intake, request, replacement    chunks come in, and change the prompts of their requests
kv_memory                       the KV cache as a plan sees it
host_memory, host_costs         which blocks are copied out and back, and what that has cost
host_loads                      what is wrong if a load has failed
swap_costs, step_parts          by which costs is chosen, and what a step computes
request_log, record_file        what a request went through, and the file for it
supported                       what engines and models the scheduler runs on
"""
