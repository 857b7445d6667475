"""Indexes as sources."""
