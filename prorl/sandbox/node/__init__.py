"""What runs once on each node: the daemon that owns every sandbox, its pool, its cleaning."""
