"""A crawl that reads the pages a query needs."""
