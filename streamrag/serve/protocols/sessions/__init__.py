"""Sessions over HTTP: context that streams in for hours.

routes      the routes below /v1/sessions
socket      one WebSocket of a session: data and questions in, answers and events out
requests    the schema of requests, and what both transports do with them
"""
