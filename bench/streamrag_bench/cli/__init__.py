"""The commands that streamrag-bench adds to the `streamrag` program."""
