"""Scored rows become parts and a commit."""
