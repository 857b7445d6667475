"""What the paper says, as data.

Sources: the text and tables of arXiv 2604.16395 (v2), by section; and where it says so, the tables of the artifact that
was published with it (github.com/rajveerb/stream2llm), from which seconds follow to about 5 %. Its clock starts when
retrieval has ended, as that of `ttft_after_retrieval_s`.
"""

from typing import NamedTuple


class Workload(NamedTuple):
    """Section 6.1 and table 2."""

    num_queries: int
    budget: int
    """Tokens of a step."""


WORKLOADS = {"crawler": Workload(4_322, 2_048), "anns": Workload(500, 8_192)}

SECONDS: dict[tuple[str, float, str], tuple[float | None, float | None, float | None]] = {
    ("crawler", 4.0, "not streaming"): (0.752, 4.342, 5.401),
    ("crawler", 4.0, "vLLM-S"): (0.072, 1.957, 4.454),
    ("crawler", 4.0, "FCFS"): (0.068, 0.619, 2.082),
    ("crawler", 4.0, "LCAS"): (0.069, 0.742, 1.466),
    ("crawler", 2.0, "not streaming"): (0.182, 1.565, 2.490),
    ("anns", 2.0, "not streaming"): (0.383, 3.679, 5.230),
    ("anns", 2.0, "FCFS"): (0.269, 1.629, 3.553),
    ("anns", 1.0, "not streaming"): (0.255, 2.012, 3.987),
    ("anns", 1.0, "FCFS"): (0.162, 0.765, 2.744),
}
"""Figures 8 and 9, by workload, QPS and way: P50, P95 and P99 in seconds. From the artifact's tables, good to 5 %."""


class SpeedUp(NamedTuple):
    """How many times as fast, as the text has it; a range where it gives one."""

    workload: str
    qps: float
    rank: str
    way: str
    over: str
    least: float
    most: float


SPEED_UPS = (
    SpeedUp("crawler", 0.5, "P50", "streaming", "not streaming", 3.9, 4.3),
    SpeedUp("crawler", 1.0, "P50", "streaming", "not streaming", 3.9, 4.3),
    SpeedUp("crawler", 4.0, "P50", "streaming", "not streaming", 10.8, 11.0),
    SpeedUp("crawler", 2.0, "P95", "FCFS", "vLLM-S", 1.44, 1.44),
    SpeedUp("crawler", 2.0, "P95", "LCAS", "vLLM-S", 1.32, 1.32),
    SpeedUp("crawler", 2.0, "P95", "MCPS", "vLLM-S", 0.73, 0.73),
    SpeedUp("crawler", 4.0, "P95", "FCFS", "vLLM-S", 3.16, 3.16),
    SpeedUp("crawler", 4.0, "P95", "LCAS", "vLLM-S", 2.64, 2.64),
    SpeedUp("crawler", 4.0, "P95", "MCPS", "vLLM-S", 0.71, 0.71),
    SpeedUp("anns", 1.0, "P95", "streaming", "not streaming", 2.49, 2.63),
    SpeedUp("anns", 2.0, "P95", "FCFS", "not streaming", 2.26, 2.26),
    SpeedUp("anns", 2.0, "P95", "LCAS", "not streaming", 1.81, 1.81),
    SpeedUp("anns", 2.0, "P95", "MCPS", "not streaming", 1.53, 1.53),
    SpeedUp("anns", 2.0, "P50", "streaming", "not streaming", 1.30, 1.42),
)
"""Section 6.2. "streaming" is all of them."""

EVICTIONS = ("recompute", "swap", "cost")

PRESSURE_NOT_STREAMING = {"crawler": (0.64, 8.97), "anns": (0.72, 6.56)}
"""Table 3: P50 and P99 in seconds."""

PRESSURE: dict[str, dict[str, tuple[tuple[float, float], ...]]] = {
    "crawler": {
        "vLLM-S": ((8.59, 0.78), (7.29, 0.66), (8.25, 0.71)),
        "FCFS": ((8.77, 10.03), (7.78, 6.69), (8.30, 8.62)),
        "LCAS": ((8.61, 9.23), (7.32, 4.80), (7.82, 9.14)),
        "MCPS": ((5.92, 0.73), (3.86, 0.48), (4.96, 0.77)),
    },
    "anns": {
        "vLLM-S": ((2.53, 0.19), (2.26, 0.18), (2.63, 0.19)),
        "FCFS": ((2.70, 1.84), (2.37, 1.26), (2.70, 2.04)),
        "LCAS": ((2.38, 1.79), (1.62, 0.97), (2.44, 1.79)),
        "MCPS": ((2.20, 0.19), (1.47, 0.22), (2.23, 0.19)),
    },
}
"""Table 3: speed-ups over not streaming at P50 and P99, by eviction in the order of `EVICTIONS`."""

PREEMPTIONS: dict[str, dict[str, tuple[int, int, int, float]]] = {
    "crawler": {
        "vLLM-S": (2_448, 779, 1_735, 0.17),
        "FCFS": (3_552, 709, 1_575, 0.21),
        "LCAS": (12_564, 1_049, 3_486, 0.21),
        "MCPS": (3_316, 721, 1_741, 0.19),
    },
    "anns": {
        "vLLM-S": (130, 35, 125, 0.02),
        "FCFS": (342, 50, 331, 0.01),
        "LCAS": (385, 48, 373, 0.02),
        "MCPS": (215, 40, 237, 0.0),
    },
}
"""Table 4: preemptions by eviction in the order of `EVICTIONS`, and the share that the cost model swapped."""

COMPLETION_TOLERANCE = 0.01
"""Figure 10: "indistinguishable" completion times, which in the artifact are within about 1 %."""

INVALIDATED_TOKENS, INVALIDATED_SHARE = 10_000, 0.10
"""Figure 11: at every rate more than this share of the requests invalidates more than so many tokens."""

KV_TOKENS = 1_680_000
"""Capacity of two H200s at 80 %, which follows from section 6.1; it is that of the profile."""

SORT_US = {"FCFS and LCAS": (15, 16), "MCPS": (12, 13)}
"""Section 6.5: microseconds of a sort with 50 requests."""
SORT_P99_US = 165
"""The same, at P99 with 500: less than this."""
