"""`streamrag index`: folders of documents become indexes or tables."""

from streamrag.cli.index.command import add_arguments as add_arguments
