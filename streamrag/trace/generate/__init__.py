"""Generated workloads with the published statistics of the Stream2LLM paper. docs/traces.md describes them."""

from streamrag.trace.generate.hints import HintKind as HintKind
from streamrag.trace.generate.hints import with_hints as with_hints
from streamrag.trace.generate.workloads import LongWindow as LongWindow
from streamrag.trace.generate.workloads import WorkloadName as WorkloadName
from streamrag.trace.generate.workloads import anns as anns
from streamrag.trace.generate.workloads import crawler as crawler
from streamrag.trace.generate.workloads import generate as generate
