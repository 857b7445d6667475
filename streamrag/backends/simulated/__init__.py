"""vLLM's own scheduler and KV cache manager, driven in virtual time without a model. Its modules import vLLM.

    SimulatedEngine.step ─▶ Scheduler.schedule ─▶ Runner.execute ─▶ Scheduler.update_from_output ─▶ outputs

Nothing waits: the clock jumps. The same seed gives the same run.
"""
