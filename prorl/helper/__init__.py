"""Code that may not share a loop with ours runs in a process of its own: a helper.

    Helpers (a pool, one a loop and Program)      python -m prorl.envs.role
        Helper -- question (pickle) ------------> answer(question)
               <- "op", what it wants of us ----- call_back(...)        as often as it likes
               -- what came of it -------------->
               <- value, or words and line ------                       (msgpack: plain data)

A question is answered, or the asker gets what the code raised, where that is a ProrlError, or one
`HelperError`, which says what happened in the code's own words, with its file and line:

- `Raised`: the code raised, or gave what is no plain data. The process goes on.
- `Late`: over its time by the clock (`wall_s`) or of the processor (`cpu_s`); where it was then.
  The process is killed, with what it has started.
- `Died`: the process ended. It is asked again once, of a fresh process, before that counts, since
  neither the machine nor an earlier question may decide about this one; so with a MemoryError of a
  process that has answered before.

One question at a time for a process, so that a limit, a leak and a crash belong to one question. A
pool has one queue; it starts a second process, and so on up to `most`, once the oldest question has
waited for longer than a start takes. It keeps those that are idle for IDLE_S and ends with its
loop, of which all stages share it. An answer bears its question's number, and a process whose
answer was not read whole is ended, so that nobody gets the answer of another. A
process whose start fails is not tried again for REFUSED_S. A process may hold `memory_bytes` more
than after its start. It is spawned, never forked; dies with the thread that started it; is what the
kernel ends first when memory runs out. Time in which this process was itself stopped does not
count, nor time in which others had the helper's processor. Who gives up waiting (cancellation) has
the code interrupted; its process is killed at its end, or CANCEL_S later.

Not promised: isolation. What runs here is trusted with files and network as we are; what a policy
writes runs in sandboxes. It cannot signal the processes that it descends from
(`prorl/linux/spared.py`).
"""

from prorl.helper.pool import Helpers, close, pool
from prorl.helper.process import Died, HelperError, HelperProgram, Late, Raised

__all__ = ["Died", "HelperError", "HelperProgram", "Helpers", "Late", "Raised", "close", "pool"]
