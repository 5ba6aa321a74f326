"""One module a command of `prorl`; `prorl.cli.app` loads the one that is called."""
