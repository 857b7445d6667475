"""Sessions over HTTP: context that streams in for hours.

routes      the routes below /v1/sessions
socket      one WebSocket of a session: data and questions in, answers and events out
requests    what clients send either way, checked, and how it is done
"""
