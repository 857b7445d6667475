"""A table of PostgreSQL with pgvector: searched in stages, and filled from a folder of documents."""
