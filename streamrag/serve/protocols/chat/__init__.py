"""`POST /v1/chat/completions`, compatible with OpenAI's clients: requests, their queries, and the answers."""
