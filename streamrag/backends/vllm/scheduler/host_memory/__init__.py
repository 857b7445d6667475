"""Host memory for KV blocks: which are copied out, which come back, and what that costs. The life of a block:

    computed ──▶ held by requests ──the last gives it up──▶ free, in the prefix cache ──reused──▶ overwritten
                   │   ▲     ▲      (eviction, update, end)        │                        │
       written     │   │     └──────────── prefix hit ─────────────┘                        │ wanted back: saved
       through,    │   │ loaded, when its request runs again                                │ in that very step,
       if there    ▼   │ and loading costs less                                             ▼ before that
       is time    in a host slot, valid once a worker has reported the save ◀────────────────┘
                   │
                   ▼
                  dropped: its last owner has ended or changed its prompt, the pool is full and the others were used
                  later, its load has failed, or the prefix cache was reset

A block is known by vLLM's hash of its content and of all before it: equal blocks are stored once.

memory       `HostMemory`: follows released blocks, and makes the copies of each step
loads        loads whose outcome is not known yet, and what is wrong if one fails
costs        what decisions were expected to cost, and what they did cost
prices       the prices by which recomputing and copying are compared
step_parts   what a step of vLLM computes
"""
