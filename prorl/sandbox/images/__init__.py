"""Images: made without a container registry, unpacked once a node."""
