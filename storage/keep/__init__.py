"""The upkeep of a run directory over time: compaction, collection, retention."""
