"""`streamrag doctor`: whether this machine can serve, or whether a server gains from prefilling early."""

from streamrag.cli.doctor.command import add_arguments as add_arguments
