"""A model behind an OpenAI-compatible server.

backend             the backend: sends prompts, streams answers
server_tokenizer    the server's tokenizer, if it has an endpoint for it
answers             validates the fields of the server's responses
http                requests, retries, limits
event_stream        parses server-sent events
messages            what a server says about an error
bytes               counts the bytes that the server sends
"""

from streamrag.backends.openai.backend import OpenAIBackend as OpenAIBackend
