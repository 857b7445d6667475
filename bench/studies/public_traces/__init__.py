"""Public traces of other systems, read as they are and written as traces of streamrag."""
