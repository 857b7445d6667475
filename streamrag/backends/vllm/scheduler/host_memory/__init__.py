"""Host memory for KV blocks: which are copied out and back, and the cost of copies. The life of a block:

    computed ──▶ held by requests ──the last releases it──▶ free, in the prefix cache ──reused──▶ overwritten
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

memory             `HostMemory`: tracks released blocks, and plans the copies of each step
loads              loads with an unknown outcome, and the KV that is wrong if one fails
costs              expected and observed costs of decisions, for the records of requests
hardware_profile   the profile of this engine, by which recomputing and copying are compared
step_parts         the number of tokens that a step computes for each request
"""
