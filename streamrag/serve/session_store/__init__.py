"""The sessions of a service, and the folder with their logs."""
