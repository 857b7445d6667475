"""Loads from traces, put on a real engine or a simulated one, and what came of them."""
