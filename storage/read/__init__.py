"""Run directories read: SQL, replay, verify."""
