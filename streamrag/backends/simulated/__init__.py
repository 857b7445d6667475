"""vLLM's own scheduler and KV cache manager, driven in virtual time without a model. Its modules import vLLM.

    SimulatedEngine.launch ──▶ Scheduler.schedule ─▶ Runner.execute      a step begins
    SimulatedEngine.collect ─▶ Scheduler.update_from_output ─▶ outputs   the step has ended

`engine` is the body of vLLM's loop, for tests that control the clock; `loop` runs it as a task in virtual time, and
`client` is the interface for programs. The clock jumps instead of waiting. A seed determines a run.
"""
