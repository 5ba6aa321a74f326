"""Run directories: written by the store, read by anyone with Parquet, served to trainers over Flight, live or replayed.

Read `layout.py` (what lies where), then `writer.py` (how it gets there), `stream.py` (how trainers get it).
"""

if __name__ != "prorl.storage":
    raise ImportError("import prorl.storage instead of storage")
