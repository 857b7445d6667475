"""Bounds on the requests of a service's clients."""

from typing import Any, get_args

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
    stream_s: float = Field(default=900.0, gt=0, description="the same for streams, whose client brings the context")
    max_body_bytes: int = Field(default=1 << 20, ge=1024, description="bytes of a request's body")
    max_stream_bytes: int = Field(
        default=16 << 20, ge=1024, description="bytes of a stream's body, or of one client's waiting frames in memory"
    )
    max_frame_bytes: int = Field(default=1 << 20, ge=1024, description="bytes of a frame, or of a line of a stream")
    max_head_bytes: int = Field(default=16_384, ge=1024, description="bytes of a request's line and headers")
    head_s: float = Field(default=10.0, gt=0, description="seconds to receive a request's line and headers")
    body_s: float = Field(default=60.0, gt=0, description="seconds to receive a request's body, except a stream's")
    max_connections: int = Field(default=2048, ge=1, description="open connections")
    max_connections_per_client: int = Field(
        default=1024, ge=1, description="open requests and WebSockets of one client, where there are keys"
    )
    max_states: int = Field(default=256, ge=0, description="responses stored for previous_response_id")
    max_sessions: int = Field(default=64, ge=0, description="open sessions")
    max_sessions_per_client: int = Field(default=16, ge=0, description="open sessions of one client")
    max_session_tokens: int = Field(default=1 << 23, ge=0, description="tokens in the windows of all sessions")
    max_session_tokens_per_client: int = Field(default=1 << 21, ge=0, description="the same for one client's sessions")
    max_watches: int = Field(default=32, ge=0, description="watched questions of one session")
    max_readers: int = Field(default=4, ge=0, description="readers of one session's events, WebSockets included")
    session_idle_s: float = Field(default=3600.0, gt=0, description="seconds until an idle session is closed")
    session_unused_s: float = Field(default=300.0, gt=0, description="the same for a session that was never used")
    session_read_s: float = Field(default=86_400.0, gt=0, description="the same for a session that has only readers")
    max_state_bytes: int = Field(default=64 << 20, ge=0, description="bytes of memory for stored responses")
    state_s: float = Field(default=3600.0, gt=0, description="seconds until an unused stored response is removed")
    idle_s: float = Field(
        default=300.0, gt=0, description="seconds that a stream, or an unused question, waits for its client"
    )
    send_timeout_s: float = Field(default=30.0, gt=0, description="seconds for a client to read what was sent")
    drain_s: float = Field(default=30.0, ge=0, description="seconds for open queries to end when the service stops")
