"""The report of a benchmark: comparisons of cells, pictures, timelines, one HTML page."""
