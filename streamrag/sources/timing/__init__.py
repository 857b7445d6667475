"""A source that sends the events of another source later."""
