"""What the demo is made of: documentation to ask about, a small model, a tiny random one."""
