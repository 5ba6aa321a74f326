"""One file per kind of sandbox; each has `launch`, which turns a forked child of the zygote into a
sandbox.
"""
