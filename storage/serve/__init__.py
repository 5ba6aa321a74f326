"""The store's process: decisions, delivery, streams."""
