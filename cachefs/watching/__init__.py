"""What a mount shows of itself: metrics for Prometheus, a page for people, probes for whoever runs it.

Idea: nothing is counted here. The rooms count for themselves; this one asks them when somebody asks it, so that a mount at
which nobody looks pays nothing but a sample every two seconds. Everything is read-only and without a password: whoever
reaches the port sees names of files and processes.
"""

from cachefs.watching.endpoint import Endpoint, open_endpoint
from cachefs.watching.watch import Watch

__all__ = ["Endpoint", "Watch", "open_endpoint"]
