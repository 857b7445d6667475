"""How requests come in and answers go out: connections, the gate, JSON bodies, WebSockets, streams of events."""
