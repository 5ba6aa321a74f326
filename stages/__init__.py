"""The streaming operators INIT, RUN and EVAL, the host that runs them, and the process around it.

Read `host.py` (one host for all three), then `init.py`, `run.py`, `eval.py` (what each does to a
row), then `chained.py` (a stage as a member of a service), `chain.py` (the stages of one process)
and `__main__.py` (that process).
"""

if __name__ != "prorl.stages":
    raise ImportError("import prorl.stages instead of stages")
