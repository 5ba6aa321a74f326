"""The control log: what survives the gateway."""
