"""Worker processes for blocking computations."""
