"""What all parts share and none is about: validation, files, processes."""
