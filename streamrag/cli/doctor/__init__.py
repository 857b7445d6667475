"""`streamrag doctor`: check whether this machine can serve, or whether a server reuses prefixes."""

from streamrag.cli.doctor.command import add_arguments as add_arguments
