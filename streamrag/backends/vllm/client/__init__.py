"""What runs in the program that embeds an engine."""
