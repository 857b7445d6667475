"""Bounds on the requests of a service's clients."""

from typing import Any, ClassVar, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator


class Checked(BaseModel):
    """A frozen model without unknown fields that does not take booleans for numbers."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @field_validator("*", mode="before")
    @classmethod
    def _reject_bool_for_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Return the value; raise ValueError for a boolean where a number belongs: pydantic would take it as 0 or 1."""
        wanted = cls.model_fields[info.field_name or ""].annotation
        if isinstance(value, bool) and bool not in (wanted, *get_args(wanted)):
            raise ValueError("must not be true or false")
        return value


class Limits(Checked):
    """Limits of a service. Requests that exceed them are refused with 429 or 413, without effect on other clients."""

    max_queries: int = Field(default=64, ge=1, description="open queries")
    max_queued_tokens: int = Field(default=262_144, ge=1, description="tokens still to be computed for open queries")
    max_queries_per_client: int = Field(default=32, ge=1, description="open queries of one client")
    max_requests_per_minute: int = Field(default=600, ge=1, description="queries that one client may start in a minute")
    max_prompt_tokens_per_minute: int = Field(
        default=1_000_000, ge=1, description="prompt tokens of one client in a minute; a fifteenth of that at once"
    )
    max_retrievals_ahead: int = Field(
        default=0, ge=0, description="retrievals for one question while it is still being asked; 0 for none"
    )
    max_tokens: int = Field(default=1024, ge=1, description="tokens of one answer, even if the client asks for more")
    deadline_s: float = Field(default=120.0, gt=0, description="seconds from a query's admission to its last token")
    max_body_bytes: int = Field(default=1 << 20, ge=1024, description="bytes of a request's body")
    max_sessions: int = Field(default=64, ge=0, description="open sessions, of which one client may have a quarter")
    session_idle_s: float = Field(default=3600.0, gt=0, description="seconds until an idle session is closed")
    idle_s: float = Field(
        default=300.0, gt=0, description="seconds that a stream, or an unused question, waits for its client"
    )
    drain_s: float = Field(default=30.0, ge=0, description="seconds for open queries to end when the service stops")

    # The others are constants, which honest clients do not reach.
    stream_s: ClassVar[float] = 900.0  # `deadline_s` of streams: clients that retrieve by themselves may take minutes
    max_stream_bytes: ClassVar[int] = 16 << 20  # of a stream's body, or of one client's waiting frames: 4M tokens
    max_frame_bytes: ClassVar[int] = 1 << 20  # of a frame, or of a line of a stream, which are parsed whole
    max_head_bytes: ClassVar[int] = 16_384  # of a request's line and headers: twice what other servers take
    head_s: ClassVar[float] = 10.0  # to receive a request's line and headers, which fit into a few packets
    body_s: ClassVar[float] = 60.0  # to receive a request's body, except a stream's: 17 KiB a second for the largest
    max_connections: ClassVar[int] = 2048  # open connections, most of which wait
    max_connections_per_client: ClassVar[int] = 1024  # half of them, where there are keys
    max_states: ClassVar[int] = 256  # responses stored for previous_response_id
    max_state_bytes: ClassVar[int] = 64 << 20  # of memory for stored responses: each may have a quarter of a MiB
    state_s: ClassVar[float] = 3600.0  # until an unused stored response is removed, as an idle session
    max_session_tokens: ClassVar[int] = 1 << 23  # in the windows of all sessions: 1,024 windows of 8,192
    max_watches: ClassVar[int] = 32  # watched questions of one session, each of which is answered after each change
    max_readers: ClassVar[int] = 4  # of one session's events, WebSockets included: a program, and people who look on
    session_unused_s: ClassVar[float] = 300.0  # `session_idle_s` of a session that was never used
    session_read_s: ClassVar[float] = 86_400.0  # `session_idle_s` of a session that has only readers
    send_timeout_s: ClassVar[float] = 30.0  # for a client to read what was sent; one that sleeps has to ask again
