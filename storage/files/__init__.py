"""Files of a run directory: names, parts, durable writes, object stores."""
