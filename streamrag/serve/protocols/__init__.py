"""The protocols of a service: one module or folder each, with its routes and its encoder of events.

chat/, responses/   OpenAI's chat completions and Responses
mcp                 one tool, for agents
ask, streams        a question, answered by every event of its query; with the client's own context, streamed in
retrieve            retrieval without an answer
sessions/           context that streams in for hours
event_encoder       the encoder of ask, streams, retrieve and sessions: the events of `streamrag.telemetry` as SSE
"""
