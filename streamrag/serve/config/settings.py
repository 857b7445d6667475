"""All settings of a service: sections of a TOML file, of the environment and of the command line.

[source]                                STREAMRAG__SOURCE__INDEX=./handbook-index
index = "./handbook-index"              streamrag serve --source.index ./handbook-index
"""

import json
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, SecretStr

from streamrag.engine.eviction import EvictionMode
from streamrag.engine.policies import DEFAULT_POLICY
from streamrag.modes import PromptTemplate
from streamrag.serve.limits import Checked, Limits

_PROMPT = PromptTemplate()


def _words(value: Any) -> Any:
    """Return a list, of a text too: words between commas or spaces."""
    return value.replace(",", " ").split() if isinstance(value, str) else value


def _object(value: Any) -> Any:
    """Return a table, of JSON too."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is no JSON: {error}") from None


Words = Annotated[tuple[str, ...], BeforeValidator(_words)]
Table = Annotated[dict[str, Any], BeforeValidator(_object)]


class Section(Checked):
    """A section; unknown names are errors."""


class SourceSettings(Section):
    """The place to search: one of `urls`, `index`, `postgres` and `trace`; with none, clients bring their context."""

    urls: Words = Field(default=(), description="crawl from these addresses")
    index: Path | None = Field(default=None, description="search an index made by `streamrag index build`")
    postgres: SecretStr | None = Field(
        default=None,
        description="search a table with pgvector: postgresql://user@host/database, or env:NAME of a variable",
    )
    trace: Path | None = Field(default=None, description="replay what `streamrag record` recorded")
    max_depth: int = Field(default=2, ge=0, description="links that a crawl follows from a start address")
    max_pages: int = Field(default=20, ge=1, description="pages that a crawl fetches at most")
    crawl_timeout_s: float = Field(default=30.0, gt=0, description="seconds for a whole crawl")
    same_host: bool = Field(default=True, description="follow only links within the hosts of the start addresses")
    allow_private: bool = Field(default=False, description="crawl private and loopback addresses too")
    obey_robots: bool = Field(default=True, description="fetch only what robots.txt allows")
    sitemaps: bool = Field(default=False, description="look for pages in sitemaps too")
    send_traceparent: bool = Field(
        default=False, description="tell crawled sites the trace of a query, as where they are one's own"
    )
    cache_folder: Path | None = Field(default=None, description="keep pages there for later questions")
    cdp_url: str | None = Field(default=None, description="render pages in the browser at this CDP address")
    table: str = Field(default="passages", description="the table of `postgres`")
    embedder: str | None = Field(
        default=None, description="what index or table was made with, if not the default; it is loaded, so trust it"
    )
    hybrid: bool = Field(default=False, description="search `index` by keywords too, and fuse both rankings")
    rerank: str | None = Field(
        default=None,
        description="as hybrid, then rerank: late-interaction, or a cross-encoder; it is loaded, so trust it",
    )
    sentences: int | None = Field(
        default=None, ge=1, le=4096, description="with `rerank`: the best so many sentences in place of whole passages"
    )
    k: int = Field(default=5, ge=1, le=1000, description="passages in the context")


class ModelSettings(Section):
    """The model that answers: one that vLLM loads here, or one of a server."""

    name: str = Field(default="", description="path or name of a model for vLLM, or its name at `server`")
    server: str | None = Field(
        default=None, description="use this OpenAI-compatible server in place of an embedded vLLM"
    )
    api_key: SecretStr | None = Field(default=None, description="for `server`; from the environment or the file only")
    tokenizer: str | None = Field(default=None, description="the model's tokenizer, for exact prompts with `server`")
    timeout_s: float = Field(default=60.0, gt=0, description="the longest silence of `server`, seconds")
    max_model_len: int | None = Field(default=None, ge=16, description="most tokens of prompt and answer together")
    served_name: str | None = Field(default=None, description="as clients name it, if not by the last part of its name")


class EngineSettings(Section):
    """The embedded vLLM; what is not set is its choice."""

    strategy: Literal["streaming", "warming"] = Field(default="streaming", description="how it prefills early")
    policy: str = Field(default=DEFAULT_POLICY, description="whom it serves first")
    can_partial_evict: bool | None = Field(
        default=None, description="whether unfinished prompts may take others' memory"
    )
    eviction: EvictionMode | None = Field(default=None, description="what becomes of the KV of those that make room")
    host_kv_bytes: int | None = Field(default=None, ge=0, description="host memory for KV, for each worker")
    profile: str | None = Field(default=None, description="name or path of the hardware's costs")
    dtype: str = Field(default="auto", description="of weights and KV; `streamrag doctor` says what is chosen")
    max_num_batched_tokens: int | None = Field(default=None, ge=1, description="most tokens computed in one step")
    max_num_seqs: int | None = Field(default=None, ge=1, description="most requests computed in one step")
    kv_cache_bytes: int | None = Field(
        default=None, ge=1, description="size of the KV cache; 4 GiB by default on a CPU"
    )
    gpu_memory_utilization: float | None = Field(
        default=None, gt=0, le=1, description="share of the device's memory to use"
    )
    seed: int = Field(default=0, description="of random numbers, for requests that have none")
    log_path: Path | None = Field(default=None, description="where the engine's own log goes")
    engine_args: Table = Field(
        default={}, description="further arguments of vLLM's AsyncEngineArgs; they take precedence"
    )


class ReplicaSettings(Section):
    """Engines in replicas of Ray Serve's; with `number` 0 there is one engine, in the service's own process."""

    number: int = Field(default=0, ge=0, description="engines to start with")
    router: str = Field(default="soonest", description="who chooses the replica of a query")
    address: str | None = Field(
        default=None, description='a Ray cluster, as "auto" or "head:6379"; else one is started on this machine'
    )
    name: str | None = Field(
        default=None,
        min_length=1,
        description="what engines and sources are called on a cluster, each service's its own; else by host and port",
    )
    min_number: int | None = Field(default=None, ge=1, description="fewest engines when there is little to do")
    max_number: int | None = Field(
        default=None, ge=1, description="most engines under load; else their number stays as it is"
    )
    queued_tokens: int = Field(
        default=8192, ge=1, description="tokens of prompts that wait in each engine before there is another one"
    )
    upscale_delay_s: float = Field(
        default=10.0, gt=0, description="seconds for which too much must have waited before there is another engine"
    )
    downscale_delay_s: float = Field(
        default=600.0, ge=0, description="seconds with too little to do before there is one less"
    )
    max_open: int = Field(default=64, ge=1, description="queries that are open in one engine at once")
    max_replays: int = Field(
        default=3, ge=0, description="times that a query which has shown nothing is asked again when its engine is lost"
    )
    num_cpus: float = Field(default=1.0, ge=0, description="CPUs that each takes of its node's")
    num_gpus: float = Field(default=0.0, ge=0, description="GPUs that each takes")
    accelerator: str | None = Field(default=None, description='what its node must have, as Ray names it: "H100"')
    resources: Table = Field(default={}, description="further resources of Ray's that each takes, by name")
    drain_s: float = Field(
        default=600.0, gt=0, description="seconds that an engine which is stopped goes on with its queries"
    )
    sources: int = Field(
        default=0, ge=0, description="replicas of the source; 0 retrieves in the service's own process"
    )
    max_sources: int | None = Field(default=None, ge=1, description="most replicas of the source under load")
    source_num_cpus: float = Field(default=0.0, ge=0, description="CPUs that each replica of the source takes")
    front_num_cpus: float = Field(
        default=0.0, ge=0, description="CPUs that the service itself takes as an application of Ray Serve's"
    )
    place_s: float = Field(
        default=900.0,
        gt=0,
        description="longest that replicas wait for a node of a cluster with room for them, seconds",
    )


class PromptSettings(Section):
    """The words around the context."""

    system: str = Field(default=_PROMPT.system, description="the system text, which says how to cite")
    before_context: str = Field(default=_PROMPT.before_context, description="what stands before the passages")
    passage: str = Field(default=_PROMPT.passage, description="a passage, with {number}, {title}, {uri} and {text}")
    no_context: str = Field(default=_PROMPT.no_context, description="in place of passages where there are none")
    cut_short: str = Field(default=_PROMPT.cut_short, description="behind the passages when retrieval was cut short")
    after_context: str = Field(default=_PROMPT.after_context, description="the end, with {question}")
    max_context_tokens: int | None = Field(
        default=None, ge=0, description="most tokens of passages; the rest is left out"
    )


class AnswerSettings(Section):
    """Sampling of answers, where a client does not say."""

    max_tokens: int = Field(default=256, ge=1, description="most tokens of an answer")
    temperature: float = Field(default=0.0, ge=0, description="0 is greedy")
    top_p: float = Field(default=1.0, gt=0, le=1, description="the share of probability to sample from")
    top_k: int = Field(default=0, ge=0, description="how many tokens to sample from; 0 for all")
    overlap: bool = Field(default=True, description="prefill while retrieval runs")
    on_source_error: Literal["raise", "answer"] = Field(
        default="raise", description="fail when retrieval fails, or answer with what it found"
    )


class LimitSettings(Limits):
    """Bounds on what clients may do at once. What exceeds them is refused with 429 or 413."""


class KeySettings(Section):
    """Keys of API clients: `file` has lines `name = "key"`. Never on the command line, where everybody can read it."""

    file: Path | None = Field(default=None, description='lines of name = "key", readable by its owner only')
    pairs: SecretStr | None = Field(default=None, description="name=key pairs between spaces, for the environment")


class ServerSettings(Section):
    """The address to listen on, and the names and pages that may use it."""

    host: str = Field(
        default="127.0.0.1", description="the address to listen on; elsewhere than loopback it wants keys"
    )
    port: int = Field(default=8080, ge=0, le=65535, description="0 takes a free one")
    no_keys: bool = Field(default=False, description="listen elsewhere than on loopback though anybody may ask")
    hosts: Words = Field(
        default=(), description="names that it is asked by beside loopback's; * for any, the default with keys"
    )
    origins: Words = Field(default=(), description="origins of pages that may ask it beside its own; * for any")
    session_log_dir: Path | None = Field(
        default=None, description="keep the text of sessions in this folder, and resume them after a restart"
    )
    on_engine_death: Literal["exit", "restart"] = Field(default="exit", description="what to do when the engine dies")
    max_restarts: int = Field(
        default=5, ge=1, description="restarts of the engine within `restart_window_s`; when it dies again, it is exit"
    )
    restart_window_s: float = Field(default=3600.0, gt=0, description="seconds in which `max_restarts` are too many")


class ObserveSettings(Section):
    """Logs and traces for the operator."""

    logs: Literal["text", "json"] = Field(default="text", description="how lines of the log are written")
    content: bool = Field(default=False, description="questions and answers in logs and traces too")
    otel_endpoint: str | None = Field(default=None, description="send traces to this OTLP address over HTTP")


class Settings(Section):
    """The settings of all sections."""

    source: SourceSettings = SourceSettings()
    model: ModelSettings = ModelSettings()
    engine: EngineSettings = EngineSettings()
    replicas: ReplicaSettings = ReplicaSettings()
    prompt: PromptSettings = PromptSettings()
    answers: AnswerSettings = AnswerSettings()
    limits: LimitSettings = LimitSettings()
    keys: KeySettings = KeySettings()
    server: ServerSettings = ServerSettings()
    observe: ObserveSettings = ObserveSettings()
