"""vLLM's scheduler, extended: what runs in the process of its engine.

hooks                       the only module that subclasses vLLM; forwards to the objects of `plugin`
plugin                      makes these objects, and gives them to each other
intake, request             chunks come in, and change the prompts of their requests
step, plan_executor         one step: order and plan; evict, set aside
queues                      vLLM's queues, and the idle streams
steps_in_flight, estimates  the steps whose output is still to come, and what is learned from all
outbox                      acknowledgements and errors
request_log, records        what a request went through, and the file for it
kv/                         KV memory on the device
host_memory/                KV memory of the host: which blocks are copied out and back, and what that costs
supported                   the engines and models that the scheduler runs on
"""
