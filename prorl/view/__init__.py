"""Pages over stored runs: a reader of run directories, in a browser of the same host."""
