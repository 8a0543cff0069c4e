"""Loads on a server: the requests and their times, the responses, and the client's own lag."""
