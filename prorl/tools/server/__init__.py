"""The tool server: one small single-threaded program in each sandbox, spoken to over a Unix socket.

Standard library and ptyprocess only, no asyncio, Python 3.8 or newer, so that it also runs as one
zipapp inside foreign images (`prorl.tools.bundle`). Read `main.py` first, then `bash.py`.

It imports nothing of prorl but `prorl.tools.catalogue`, so what it must know of Linux (/proc, the
end of a forked child) it has itself, in `children.py`, beside the owner for everybody else,
`prorl/linux/`.

What it promises: a call is run at most once; output is capped while reading goes on; a deadline
ends the command and not the server; a client that goes away ends its command. What it does not
promise: to be honest. It runs with the agent's own privileges, so the host treats every byte it
sends as hostile.
"""


class BadTool(Exception):
    """A user's tool that cannot be made; the text is for the package's author."""
