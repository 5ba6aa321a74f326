"""How a sandbox is started: the zygote that forks launchers, what they are told, their filter."""
