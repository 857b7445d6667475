"""`streamrag bench`: loads on a simulated or a real engine, and their results."""
