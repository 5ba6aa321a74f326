"""Facts and calls of Linux that several parts need. Imports nothing of prorl.

| module | what |
|---|---|
| `calls` | system calls that Python lacks, by ctypes |
| `forked` | the end of a forked child |
| `locks` | flock(2) |
| `procfs` | who a pid is, what is below it, what it uses |

The tool server (`prorl/tools/server/`) imports none of it and has the little that it needs itself:
inside an image it is a program of its own.
"""
