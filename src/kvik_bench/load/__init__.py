"""A load on a server: what is sent when, what comes back, and the client's own lag."""
