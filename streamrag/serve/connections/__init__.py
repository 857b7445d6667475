"""Transport: connections, the gate, JSON bodies, WebSockets, and event streams."""
