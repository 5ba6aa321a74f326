"""Tools: what runs inside a sandbox. `prorl.tools.server` is the tool server; its client is `prorl.sandbox.client`."""
