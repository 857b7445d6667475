"""Processes that compute, so that the event loop does not wait."""
