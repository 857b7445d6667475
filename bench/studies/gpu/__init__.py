"""What only a GPU can show: copies of KV, exactness there, streaming under load. See `__main__`."""
