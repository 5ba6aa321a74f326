"""Starts, watches and ends the processes of one service on one root.

Imports neither Arrow nor torch.

Read `service.py` first: `async with Supervisor(config) as supervisor:` is a running service.

    root.py     the root's lock, token, service.json; its short folders for sockets and sandboxd
    specs.py    which processes a service and a node have, embedded model servers among them
    child.py    one process: spawn, ready line, log file, exit by pidfd, stop
    service.py  all of them together
"""
