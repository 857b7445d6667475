"""All settings of a service, as sections of a TOML file, of the environment and of the command line.

[source]                                STREAMRAG__SOURCE__INDEX=./handbook-index
index = "./handbook-index"              streamrag serve --source.index ./handbook-index
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

from pydantic import BaseModel, BeforeValidator, Field, SecretStr, create_model

from streamrag.engine.policies import DEFAULT_POLICY
from streamrag.engine.recompute_or_swap import EvictionMode
from streamrag.modes import PromptTemplate
from streamrag.serve.limits import Checked, Limits
from streamrag.sources.crawl.options import CrawlOptions, summary

_PROMPT = PromptTemplate()


def _split_words(value: Any) -> Any:
    return value.replace(",", " ").split() if isinstance(value, str) else value


def _parse_object(value: Any) -> Any:
    """Return a string's JSON as a value, and any other value as it is. Raises ValueError if the string is no JSON."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is not JSON: {error}") from None


Words = Annotated[tuple[str, ...], BeforeValidator(_split_words)]
"""A list, or a string of words with commas or spaces between them."""

Table = Annotated[dict[str, Any], BeforeValidator(_parse_object)]  # a table, or a string with a JSON object


CRAWL = (
    "max_depth", "max_pages", "crawl_timeout_s", "same_host", "allow_private", "obey_robots", "sitemaps",
    "cache_folder", "cdp_url",
)  # fmt: skip
"""The options of a crawl that are settings, with the types, defaults and meanings that `CrawlOptions` gives them."""


def _crawl_fields() -> dict[str, Any]:
    types, defaults = get_type_hints(CrawlOptions, include_extras=True), CrawlOptions()
    return {name: (types[name], Field(default=getattr(defaults, name), description=summary(name))) for name in CRAWL}


class _Places(Checked):
    """A part of `SourceSettings`: where to look."""

    urls: Words = Field(default=(), description="start addresses of a crawl")
    index: Path | None = Field(default=None, description="an index made by `streamrag index build`")
    postgres: SecretStr | None = Field(default=None, description="a pgvector DSN, or env:NAME of a variable with one")
    trace: Path | None = Field(default=None, description="replay a recording of `streamrag record`")


if TYPE_CHECKING:  # a type checker cannot know fields that are made, and no code names them
    _Crawled = _Places
else:
    _Crawled = create_model("_Crawled", __base__=_Places, **_crawl_fields())


class SourceSettings(_Crawled):
    """The source of context: one of `urls`, `index`, `postgres`, `trace`; with none, clients bring their context."""

    base_url: str | None = Field(
        default=None,
        pattern="^https?://[^/?#][^?#]*$",
        description="address of the documents, for citations whose URI is a path",
    )
    table: str = Field(default="passages", description="the table of `postgres`")
    embedder: str | None = Field(default=None, description="embedder of the index or table; may run code, so trust it")
    hybrid: bool = Field(default=True, description="search `index` by keywords too, and fuse both rankings")
    rerank: str | None = Field(
        default=None,
        description="as hybrid, then rerank: late-interaction, or a cross-encoder; its code is run, so trust it",
    )
    sentences: int | None = Field(
        default=None, ge=1, le=4096, description="with `rerank`: best sentences, not passages"
    )
    k: int = Field(default=10, ge=1, le=1000, description="passages in the context")


class ModelSettings(Checked):
    """The model that answers: loaded by an embedded vLLM, or on a server."""

    name: str = Field(default="", description="path or name of a model for vLLM, or its name at `server`")
    server: str | None = Field(default=None, description="an OpenAI-compatible server in place of an embedded vLLM")
    api_key: SecretStr | None = Field(default=None, description="for `server`; from the environment or the file only")
    tokenizer: str | None = Field(default=None, description="the model's tokenizer, for exact prompts with `server`")
    timeout_s: float = Field(default=60.0, gt=0, description="seconds without data from `server` until it fails")
    max_model_len: int | None = Field(default=None, ge=16, description="maximum tokens of prompt and answer together")
    served_name: str | None = Field(default=None, description="name for clients; by default the last part of `name`")
    tool_call_parser: str | None = Field(default=None, description="vLLM's tool parser for the model, such as hermes")
    ignore_tools: bool = Field(default=False, description="answer requests with tools as if they had none")


class EngineSettings(Checked):
    """The engine of an embedded vLLM. Without a value, vLLM's own default holds."""

    strategy: Literal["streaming", "warming"] = Field(default="streaming", description="how it prefills early")
    answer_ahead: bool = Field(default=False, description="draft answers while retrieval runs, and verify the drafts")
    lanes: str | None = Field(
        default=None,
        pattern=r"^[1-9][0-9]?\+[1-9][0-9]?$",
        description='separate engines for prompts and for answers: "2+1" is two and one',
    )
    policy: str = Field(default=DEFAULT_POLICY, description="order in which it serves requests")
    eviction: EvictionMode | None = Field(default=None, description="what happens to the KV of preempted requests")
    host_kv_bytes: int | None = Field(default=None, ge=0, description="host memory for KV, for each worker")
    profile: str | None = Field(default=None, description="name or path of the hardware's cost profile")
    kv_cache_bytes: int | None = Field(default=None, ge=1, description="KV cache size; 4 GiB by default on a CPU")
    engine_args: Table = Field(
        default={}, description="more of vLLM's AsyncEngineArgs, such as dtype and max_num_seqs; they take precedence"
    )


class ReplicaSettings(Checked):
    """Engines as Ray Serve replicas; with `number` 0 there is one engine, in the service's own process."""

    number: int = Field(default=0, ge=0, description="engines at the start")
    router: str = Field(default="soonest", description="how the replica of a query is chosen")
    address: str | None = Field(default=None, description='Ray cluster, "auto" or "head:6379"; by default a local one')
    name: str | None = Field(
        default=None,
        min_length=1,
        description="unique prefix of the engines and sources on a cluster; by default of host and port",
    )
    max_number: int | None = Field(
        default=None, ge=1, description="maximum engines under load, minimum is `number`; by default no autoscaling"
    )
    decode: int = Field(
        default=0, ge=0, description="decode lanes at the start; the engines of `number` are then prefill lanes"
    )
    max_decode: int | None = Field(default=None, ge=1, description="maximum decode lanes; minimum is `decode`")
    queued_tokens: int = Field(default=8192, ge=1, description="queued prompt tokens per engine before one is added")
    max_open: int = Field(default=64, ge=1, description="open queries in one engine")
    num_cpus: float = Field(default=1.0, ge=0, description="CPUs of its node that each engine reserves")
    num_gpus: float = Field(default=0.0, ge=0, description="GPUs that each engine reserves")
    resources: Table = Field(
        default={},
        description='further Ray resources that each engine reserves: {"accelerator_type:H100" = 0.001}, for example',
    )
    sources: int = Field(default=0, ge=0, description="replicas of the source; 0 retrieves in the service's process")
    front_num_cpus: float = Field(default=0.0, ge=0, description="CPUs that the service reserves when deployed on Ray")


class PromptSettings(Checked):
    """The text around the context."""

    system: str = Field(default=_PROMPT.system, description="the system text, which explains how to cite")
    before_context: str = Field(default=_PROMPT.before_context, description="text before the passages")
    passage: str = Field(default=_PROMPT.passage, description="a passage, with {number}, {title}, {uri} and {text}")
    no_context: str = Field(default=_PROMPT.no_context, description="text in place of passages if there are none")
    cut_short: str = Field(
        default=_PROMPT.cut_short, description="text after passages of a retrieval that was cut short"
    )
    after_context: str = Field(default=_PROMPT.after_context, description="the end, with {question}")
    max_context_tokens: int | None = Field(default=None, ge=0, description="maximum tokens of passages")


class AnswerSettings(Checked):
    """Sampling parameters of answers, where a request has none, and how answers are made."""

    max_tokens: int = Field(default=256, ge=1, description="maximum tokens of an answer")
    temperature: float = Field(default=0.0, ge=0, description="0 is greedy")
    top_p: float = Field(default=1.0, gt=0, le=1, description="the share of probability to sample from")
    top_k: int = Field(default=0, ge=0, description="number of tokens to sample from; 0 for all")
    overlap: Literal["auto"] | bool = Field(
        default="auto", description='prefill while retrieval runs; "auto" learns whether that is faster'
    )
    on_source_error: Literal["raise", "answer"] = Field(default="raise", description="what to do if retrieval fails")


class KeySettings(Checked):
    """API keys of clients: `file` has lines `name = "key"`. Never on the command line, which every user can read."""

    file: Path | None = Field(default=None, description='lines of name = "key", readable by its owner only')
    pairs: SecretStr | None = Field(default=None, description="name=key pairs between spaces, for the environment")


class ServerSettings(Checked):
    """The address to listen on, and the host names and origins that may use it."""

    host: str = Field(default="127.0.0.1", description="the address to listen on; any but loopback requires keys")
    port: int = Field(default=8080, ge=0, le=65535, description="0 takes a free one")
    no_keys: bool = Field(default=False, description="permit an address other than loopback without keys")
    hosts: Words = Field(default=(), description="permitted host names besides loopback; * is any (default with keys)")
    origins: Words = Field(default=(), description="permitted origins besides its own; * permits any")
    session_log_dir: Path | None = Field(default=None, description="folder of session logs, to resume after a restart")
    on_engine_death: Literal["exit", "restart"] = Field(
        default="exit", description="what to do when the engine dies; five restarts an hour at most"
    )


class ObserveSettings(Checked):
    """Logs and traces for the operator."""

    logs: Literal["text", "json"] = Field(default="text", description="format of the log")
    content: bool = Field(default=False, description="include questions and answers in logs and traces")
    otel_endpoint: str | None = Field(default=None, description="send traces to this OTLP address over HTTP")


class Settings(Checked):
    source: SourceSettings = SourceSettings()
    model: ModelSettings = ModelSettings()
    engine: EngineSettings = EngineSettings()
    replicas: ReplicaSettings = ReplicaSettings()
    prompt: PromptSettings = PromptSettings()
    answers: AnswerSettings = AnswerSettings()
    limits: Limits = Limits()
    keys: KeySettings = KeySettings()
    server: ServerSettings = ServerSettings()
    observe: ObserveSettings = ObserveSettings()


HIDDEN = "(hidden)"


def commented_defaults() -> str:
    """Return a TOML text with each setting's description and default; settings without a default are commented out."""
    lines = [
        "# A configuration for `streamrag serve --config FILE`, with every setting at its default.",
        "# Settings without a default are commented out. A setting that is left out has its default.",
    ]
    for section, values in Settings():
        lines += ["", f"# {type(values).__doc__ or ''}".rstrip(), f"[{section}]"]
        for name, field in type(values).model_fields.items():
            value = getattr(values, name)
            lines.append(f"# {field.description}")
            lines.append(f"# {name} =" if value is None else f"{name} = {toml_of(value)}")
    return "\n".join(lines)


def effective(settings: Settings) -> str:
    """Return the effective settings as a TOML text, without those that are None; secrets are `HIDDEN`."""
    lines = []
    for section, values in settings:
        lines += ["", f"[{section}]"]
        lines += [f"{name} = {toml_of(value)}" for name, value in values if value is not None]
    return "\n".join(lines[1:])


def toml_of(value: Any) -> str:
    """Return a value as TOML on one line, a secret as `HIDDEN`; raise TypeError if it has no such form."""
    match value:
        case SecretStr():
            return toml_of(HIDDEN)
        case bool():
            return str(value).lower()
        case int() | float():
            return repr(value)
        case str() | Path():
            return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
        case Mapping():
            return "{" + ", ".join(f"{toml_of(str(key))} = {toml_of(each)}" for key, each in value.items()) + "}"
        case Sequence():
            return "[" + ", ".join(map(toml_of, value)) + "]"
        case BaseModel():
            return toml_of(dict(value))
    raise TypeError(f"{value!r:.80} has no TOML form")
