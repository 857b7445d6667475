"""OpenAI's Responses: over HTTP, and over WebSocket, where a program streams its own context in.

http       POST, GET, DELETE /v1/responses
sockets    one WebSocket; lanes: what goes on in it, one request after the other in each
requests   what a client asks for, checked; states: what is kept for `previous_response_id`
writing    a query's events, as events of the protocol and as one object
brought    the answer to a conversation that brings its own context
"""
