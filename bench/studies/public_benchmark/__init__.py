"""The public benchmark: its results, and the statistics that its loads are drawn from."""
