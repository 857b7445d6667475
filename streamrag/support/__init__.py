"""Utilities without domain knowledge: validation, files, processes, tasks."""
