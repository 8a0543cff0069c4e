"""Facts that both trunks read: torch-free, and about nothing but themselves."""
