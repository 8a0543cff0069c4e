"""Ways to bring plans to workers: in this process now, on other ranks later."""
