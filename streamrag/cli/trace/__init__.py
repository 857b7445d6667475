"""`streamrag trace`: show and generate traces."""

from streamrag.cli.trace.command import add_arguments as add_arguments
