"""Attack scripts against the HTTP service, and the measurement of what they cost other clients.

Each module of attacks exports `ATTACKS`, a dictionary from names to coroutine functions:

    async def attack(port: int, key: str | None, seconds: float) -> str

An attack talks to 127.0.0.1 at `port`, with the API key `key` where there is one. It stops by itself after `seconds`,
also if the service closes its connections, and returns one line that says what was sent.
"""
