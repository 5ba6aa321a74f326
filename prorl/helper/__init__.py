"""Code that may not share a loop with ours runs in a process of its own: a helper.

    Helpers (the pool of one HelperProgram)     python -m prorl.envs.users_program
        Helper -- question (pickle) ----------> answer(question)
               <- "op", a request to us ------- call_back(...)       as often as it likes
               -- the result of the request -->
               <- value, or error and line ----                      (msgpack: plain data)

A question gets an answer, or raises what the code raised, where that is a ProrlError, or one
`HelperError`, which says what happened in the code's own words, with its file and line:

- `Raised`: the code raised, or gave what is no plain data. The process goes on.
- `Late`: the code took longer than `wall_s` by the clock or `cpu_s` of the processor; the error
  says at which line. The process is killed, with what it has started.
- `Died`: the process ended. The question is first asked once more, of a fresh process, since
  neither the machine nor an earlier question may decide about it; so it is after a MemoryError of
  a process that has answered before.

A process has one question at a time, so that a limit, a leak and a crash belong to one question. A
pool has one queue. It starts a further process, up to `most`, once the oldest question has waited
for longer than a start takes; it ends processes that were idle for IDLE_S. All stages of a loop
share its pools, which end with it. An answer bears its question's number, and a process whose
answer was not read whole is ended, so that no question gets the answer of another. A program whose
start fails is not started again for REFUSED_S.

A process may take `memory_bytes` more than it had after its start. It is spawned, never forked;
dies with the thread that started it; and is what the kernel ends first when memory runs out. Time
in which this process was itself stopped does not count, nor time in which others had the helper's
processor. Where the caller is cancelled, the code is interrupted; its process is killed at its end,
or CANCEL_S later.

Not promised: isolation. What runs here is trusted with files and network as we are; what a policy
writes runs in sandboxes. It cannot signal the processes that it descends from
(`prorl/linux/spared.py`).
"""
