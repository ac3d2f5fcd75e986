"""Views of a mount: metrics for Prometheus, a page for people, probes for service managers; `why`, `doctor`, `simulate`.

This room counts nothing. The other rooms count, and each request reads their counters, so a mount without requests pays only
for a sample every two seconds and ten checks of the clock a second. The pages are read-only and need no password: every
client that reaches the port sees names of files and processes.
"""
