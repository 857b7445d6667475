"""Advice on streaming from a log of retrieval: a log of any known kind ─▶ a trace ─▶ simulations ─▶ advice."""
