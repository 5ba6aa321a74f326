"""A service around a block of code; what its process `service` is made of; nodes, clusters."""
