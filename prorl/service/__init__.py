"""The gateway: the only process that decides a rollout's fate. Entry point: `python -m
prorl.service`.
"""
