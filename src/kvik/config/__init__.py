"""Options of the engine and the server, facts of the machine, and the decisions from both."""
