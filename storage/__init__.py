"""Run directories: written by the store, read by anyone with Parquet, served to trainers.

Read `files/layout.py` (what lies where), then `write/writer.py` (how it gets there),
`serve/delivery.py` and `serve/endpoint.py` (how trainers get it).
"""

if __name__ != "prorl.storage":
    raise ImportError("import prorl.storage instead of storage")
