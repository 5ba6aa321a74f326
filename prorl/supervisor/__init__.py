"""Starts, watches and ends the processes of one service on one root.

Imports neither Arrow nor torch.

Read `service.py` first: `async with Supervisor(config) as supervisor:` is a running service.

    root.py     the root's lock, token, private socket folder, service.json
    places.py   short folders for sockets and for sandboxd; sweeps what a dead service left
    specs.py    which processes a service and a node have
    child.py    one process: spawn, ready line, log file, exit by pidfd, stop
    restart.py  the restart decision, pure
    models.py   embedded model servers: `embedded:DIR` -> address and process
    service.py  all of them together
"""
