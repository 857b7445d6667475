"""Generated workloads with the published statistics of the Stream2LLM paper. docs/traces.md describes them."""

from streamrag_bench.trace.generate.hints import HintKind as HintKind
from streamrag_bench.trace.generate.hints import with_hints as with_hints
from streamrag_bench.trace.generate.workloads import LongWindow as LongWindow
from streamrag_bench.trace.generate.workloads import WorkloadName as WorkloadName
from streamrag_bench.trace.generate.workloads import anns as anns
from streamrag_bench.trace.generate.workloads import crawler as crawler
from streamrag_bench.trace.generate.workloads import generate as generate
