"""The statistics of the public benchmark, from public traces of other systems."""
