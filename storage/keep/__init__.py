"""What a run directory needs over time: compaction, collection, retention."""
