"""Host memory for KV blocks: which are copied out, which come back, and what that costs. The life of a block:

    computed ──▶ referenced ──last reference dropped──▶ in vLLM's free list ──reused──▶ overwritten
                  │      ▲    (eviction, update, end)     │             │
                  │      └──────── prefix hit ────────────┘             │ somebody wants it back: saved in that
    write-through │      ▲                                              │ very step, before it is overwritten
                  ▼      │                                              ▼
                 in a host slot (valid once a worker has reported the save) ──▶ loaded when its request runs again
                         │
                         └──▶ dropped: its last owner ended or changed its prompt, the pool is full and others were
                              used later, a load failed, or the prefix cache was reset

A block is known by vLLM's hash of its content and of all before it: equal blocks are stored once.

memory       `HostMemory`: follows released blocks, and makes the copies of each step
loads        loads whose outcome is not known yet, and what is wrong if one fails
costs        what decisions were expected to cost, and what they did cost
prices       the prices by which recomputing and copying are compared
step_parts   what a step of vLLM computes
"""
