"""Pages from servers: asked for as robots.txt allows, and kept."""
