"""Who decides what becomes of rollouts: the state in memory and every rule over it."""
