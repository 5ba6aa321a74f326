"""The model endpoint of a session: any program that speaks to a model over HTTP drives the policy,
unmodified.

`model_endpoint` serves one attempt over `connections`, `share` bounds what that takes of the loop,
`reading` reads what is long in a helper; `chat`, `responses` and `messages` are the dialects,
`canonical` what they have in common, `ledger` places what is asked among the ids that exist.
"""
