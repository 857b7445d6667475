"""The sessions of a service: who owns which, what happened in them, and when they end."""
