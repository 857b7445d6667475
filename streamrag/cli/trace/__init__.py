"""`streamrag trace`: traces shown, converted and generated."""

from streamrag.cli.trace.command import add_arguments as add_arguments
