"""What only a GPU can show: exactness there, the time of steps and copies, streaming under load. See `__main__`."""
