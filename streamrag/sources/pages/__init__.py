"""What a page says: its text, its links, and whether another says the same."""
