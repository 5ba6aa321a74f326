"""The decisions over rollouts: the state in memory and every rule over it."""
