"""The demo: documentation to ask about, a small model, and a tiny random one."""
