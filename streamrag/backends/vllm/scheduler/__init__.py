"""vLLM's scheduler, extended for streamed prompts. This package runs in the engine's process.

hooks                       the only module that subclasses vLLM; forwards to the objects of `plugin`
plugin                      constructs the objects and connects them
intake, request             accept requests and chunks; replace the prompt of a request
step, plan_executor         one step: order the requests, plan, evict, hide what must not run
queues                      vLLM's queues, and the idle streams
steps_in_flight, estimates  steps whose output is outstanding; estimates learned from finished steps
outbox                      acknowledgements and errors for clients
request_log, records        the log of each request, and the file of records
kv/                         KV memory on the device
host_memory/                KV memory on the host: which blocks are copied out and back, and the cost of copies
supported                   checks that the engine and the model are supported
"""
