"""PostgreSQL with pgvector: search a table in stages, and fill one from a folder of documents."""
