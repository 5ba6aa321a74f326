"""A running service of either topology around a block of code."""
