"""The control log: what survives the gateway, and how it is read back."""
