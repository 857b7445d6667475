"""Bounds on what the clients of a service may do at once."""

from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator


class Checked(BaseModel):
    """A frozen model without unknown fields, in which true and false are no numbers."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        wanted = cls.model_fields[info.field_name or ""].annotation
        if isinstance(value, bool) and bool not in (wanted, *get_args(wanted)):
            raise ValueError("must not be true or false")
        return value


class Limits(Checked):
    """Bounds of a service. What exceeds them is refused with 429 or 413; no other client notices."""

    max_queries: int = Field(default=64, ge=1, description="queries that are open at once")
    max_queued_tokens: int = Field(
        default=262_144, ge=1, description="tokens still to be computed for all open queries: of prompts and of answers"
    )
    max_queries_per_client: int = Field(default=32, ge=1, description="queries of one client that are open at once")
    max_requests_per_minute: int = Field(default=600, ge=1, description="queries that one client may begin in a minute")
    max_prompt_tokens_per_minute: int = Field(
        default=1_000_000,
        ge=1,
        description="tokens of prompts that one client may have computed in a minute; a fifteenth of that at once",
    )
    max_tokens: int = Field(default=1024, ge=1, description="tokens of one answer, also where the client asks for more")
    deadline_s: float = Field(default=120.0, gt=0, description="seconds from a query's admission to its last token")
    stream_s: float = Field(default=900.0, gt=0, description="the same of a stream, whose client brings its context")
    max_body_bytes: int = Field(default=1 << 20, ge=1024, description="bytes of a request's body")
    max_stream_bytes: int = Field(default=16 << 20, ge=1024, description="bytes that one stream may send, all in all")
    max_frame_bytes: int = Field(default=1 << 20, ge=1024, description="bytes of a frame, or of a line of a stream")
    max_head_bytes: int = Field(default=16_384, ge=1024, description="bytes of a request's line and headers")
    head_s: float = Field(default=10.0, gt=0, description="seconds for a request's line and headers to come")
    body_s: float = Field(default=60.0, gt=0, description="seconds for a request's body to come, but for a stream's")
    max_connections: int = Field(default=2048, ge=1, description="connections that are open at once")
    max_connections_per_client: int = Field(
        default=1024,
        ge=1,
        description="requests and WebSockets of one client that are open at once, where there are keys",
    )
    max_states: int = Field(default=256, ge=0, description="responses that are kept for previous_response_id")
    max_sessions: int = Field(default=64, ge=0, description="sessions that are open at once")
    max_sessions_per_client: int = Field(default=16, ge=0, description="sessions of one client")
    max_session_tokens: int = Field(
        default=1 << 23, ge=0, description="tokens that the windows of all sessions may hold together"
    )
    max_session_tokens_per_client: int = Field(default=1 << 21, ge=0, description="the same of one client's sessions")
    max_watches: int = Field(default=32, ge=0, description="watched questions of one session")
    max_readers: int = Field(default=4, ge=0, description="readers of the events of one session, also on WebSockets")
    session_idle_s: float = Field(default=3600.0, gt=0, description="seconds that a session stays without use")
    session_unused_s: float = Field(
        default=300.0, gt=0, description="the same of one that was opened and not used yet: perhaps nobody knows of it"
    )
    session_read_s: float = Field(
        default=86_400.0, gt=0, description="seconds that those who only read its events keep a session"
    )
    max_state_bytes: int = Field(default=64 << 20, ge=0, description="bytes of memory that those may take")
    state_s: float = Field(default=3600.0, gt=0, description="seconds that such a response is kept without being used")
    idle_s: float = Field(default=300.0, gt=0, description="seconds that a stream waits for a word of its client")
    send_timeout_s: float = Field(default=30.0, gt=0, description="seconds for a client to read what was sent")
    drain_s: float = Field(default=30.0, ge=0, description="seconds for open queries to end when it stops")
