"""OpenAI's Responses: over HTTP, and over WebSocket, where a program streams its own context in.

routes                POST, GET, DELETE /v1/responses, and the WebSocket
socket                one WebSocket; socket_stream: the requests with one `stream_id`, one after the other
requests              what a client asks for, checked; states: what is kept for `previous_response_id`
encoder               the events of a query, as events of the protocol and as one object
response_run          one response, from its admission to its last event
conversation_stream   the answer to a conversation that brings its own context
"""
