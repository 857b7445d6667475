"""Configuration: settings from a file, the environment and the command line, and the service made from them."""
