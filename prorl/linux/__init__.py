"""Facts and calls of Linux that several parts need. Imports nothing of prorl.

The tool server (`prorl/tools/server/`) imports none of it: in an image it is a program of its own.
"""
