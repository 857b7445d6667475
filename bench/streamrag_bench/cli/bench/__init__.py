"""`streamrag bench`: loads on a simulated or a real engine, and their results."""

from streamrag_bench.cli.bench.command import add_arguments as add_arguments
