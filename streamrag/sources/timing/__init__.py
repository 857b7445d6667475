"""Sources that send the events of another source later."""
