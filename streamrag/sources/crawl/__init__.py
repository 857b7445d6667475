"""A crawl of the pages relevant to a query."""
