"""The configuration of a service: settings, where they come from, what is wrong with them, and the parts they name."""
