"""From a stream of groups to a policy update: a small DAPO trainer.

For any Hugging Face causal model (extra `torch`).

Read `loop.py` top to bottom, then `loss.py` and `pack.py`. Nothing here is needed to use prorl with
a trainer of your own: that takes `prorl.client` alone.
"""

if __name__ != "prorl.trainer":
    raise ImportError("import prorl.trainer instead of trainer")
