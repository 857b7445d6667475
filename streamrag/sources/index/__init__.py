"""Indexes of folders of documents: built, and brought up to date."""
