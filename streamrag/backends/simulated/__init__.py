"""vLLM's own scheduler and KV cache manager, driven in virtual time without a model. Its modules import vLLM.

    SimulatedEngine.launch ──▶ Scheduler.schedule ─▶ Runner.execute      a step begins
    SimulatedEngine.collect ─▶ Scheduler.update_from_output ─▶ outputs   it has ended

`engine` is that loop's body, for tests that own the clock; `loop` turns it as a task in virtual time, and `client` is
how programs speak to it. Nothing waits: the clock jumps. The same seed gives the same run.
"""
