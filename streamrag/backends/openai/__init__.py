"""A model behind an OpenAI-compatible server.

backend             what it is asked, and in which order
server_tokenizer    its tokenizer, if it has one to ask
answers             what it says, checked
http                requests, retries, limits
bytes               what it sends, counted
"""

from streamrag.backends.openai.backend import OpenAIBackend as OpenAIBackend
