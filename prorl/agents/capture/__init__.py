"""The model endpoint of an attempt: any program that speaks to a model over HTTP drives the policy,
unmodified.

`model_endpoint` serves one attempt over `connections`; `share` bounds its time on the event loop,
and `reading` parses long requests in a helper. `chat`, `responses`, `messages` and `gemini` are the
API dialects, `canonical` is what they have in common. `conversation_tree` finds the recorded ids
that a request continues.
"""
