"""Which updates of a source are worth sending."""
