"""Tools: what runs inside a sandbox.

`prorl.tools.server` is the tool server; its client is `prorl.sandbox.client`.

Every sandbox can serve the tools of `catalogue.py`: `bash`, `python`, `files`, `ipython` and
`jupyter`. Your own tool is a class in a package of yours:

    class Weather:
        description = "Weather in one city."
        parameters = {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        }

        def __call__(self, city: str) -> str:
            return "sunny"

    [project.entry-points."prorl.tools"]
    weather = "mypkg.tools:Weather"

A task of any env that derives from `BaseEnv` gets it, or one of ours that the env does not offer,
with `"tools": ["weather", "ipython"]` in its data; an env of your own offers it to all its tasks
with `offers = (user_spec("weather"),)` (`prorl.envs.tools`).

Where it runs. On the host the module is imported and `description` and `parameters` are read,
nothing is called. What the policy calls runs inside the sandbox, with the agent's rights and
limits, since whatever reads an agent's arguments may be taken over by them: no network, no secrets,
nothing of the host. A tool that needs these belongs into `Env.call` of an env of your own, as
`price` of the env `shop` does it.

How it gets there. sandboxd packs the top-level package of each registered tool, Python and data
files, into one zip (`bundle.py`) that a sandbox reads through a descriptor; the agent cannot
change it. The package's `__init__` runs inside too, so it imports no env. At most 16 MiB, no
compiled files. Other packages that it imports are found where the sandbox shows our interpreter's
site-packages. The object is made once per sandbox, in a process of its own, before the agent
begins; it keeps its state between calls and is made again if the agent kills it or a call overruns
its limit.

What it answers. Text is passed on, None is nothing, any other value becomes JSON; what it prints
comes first. An exception is a traceback with exit code 1, which the policy reads. Output is capped,
as every tool's.

What goes wrong, and when. An unknown name, a module that cannot be imported on the host, a schema
that is none: TaskError where the task is accepted. A package that cannot be packed, a class that
cannot be imported or made inside: `bad_task` when INIT starts the sandbox. Neither happens in the
middle of a rollout. Packages installed after sandboxd has started are seen by the next one.
"""
