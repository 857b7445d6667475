"""OpenAI's Responses, over HTTP and over WebSocket; on the latter, a program can stream in its own context.

routes                POST, GET, DELETE /v1/responses, and the WebSocket
socket                one WebSocket, with a stream of requests for each `stream_id`
requests              the schema of requests, and their checks
states                stored responses, for `previous_response_id`
encoder               encodes the events of a query as events of the protocol and as one response object
response_run          one response, from its admission to its last event
conversation_stream   the answer to a conversation that brings its own context
"""
