"""The session door: any program that speaks to a model over HTTP drives the policy, unmodified.

`door` serves one attempt; `chat`, `responses` and `messages` are the dialects, `canonical` what
they have in common, `ledger` places what is asked among the ids that exist.
"""
