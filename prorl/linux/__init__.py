"""Facts and calls of Linux that several parts need: system calls, /proc. Imports nothing of prorl."""
