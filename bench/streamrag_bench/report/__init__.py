"""Reports of a benchmark: comparisons, plots, timelines, and an HTML page."""
