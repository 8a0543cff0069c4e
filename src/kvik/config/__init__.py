"""What the user wants, what model and machine are, and what follows from them."""
