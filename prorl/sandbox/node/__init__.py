"""The daemon that runs once on each node: it owns every sandbox, its pool, its cleaning."""
