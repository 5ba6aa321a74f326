"""From a stream of groups to a policy update: a small DAPO trainer.

For Hugging Face causal models with plain causal attention, proved at start (extra `torch`), on one
device; many GPUs are the business of other trainers, over the same stream.

Read `loop.py` top to bottom, then `loss.py` and `pack.py`. Nothing here is needed to use prorl with
a trainer of your own: that takes `prorl.client` alone.
"""

if __name__ != "prorl.trainer":
    raise ImportError("import prorl.trainer instead of trainer")
