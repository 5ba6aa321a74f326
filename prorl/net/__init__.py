"""The identities of processes and hosts: certificates (`tls`), tokens (`bearer`), and the one table
of who may do what (`access`).
"""
