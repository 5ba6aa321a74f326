"""The gateway's HTTP side."""
