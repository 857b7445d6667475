"""HTTP requests within limits, as robots.txt allows, with a cache."""
