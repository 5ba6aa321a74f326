"""Starts sandboxes: the zygote that forks launchers, their configuration, their filter."""
