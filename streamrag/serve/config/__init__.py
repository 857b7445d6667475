"""How a service is configured: settings, where they come from, what is wrong with them, the parts they name."""
