"""What a mount shows of itself: metrics for Prometheus, a page for people, probes for service managers.

Idea: nothing is counted here. The rooms count for themselves, and each request reads their counters, so that a mount
without requests pays nothing but a sample every two seconds and looks at the time. Everything is read-only and without a
password: every client that reaches the port sees names of files and processes.
"""

from cachefs.observe.endpoint import Endpoint, open_endpoint
from cachefs.observe.watch import Pauses, Watch

__all__ = ["Endpoint", "Pauses", "Watch", "open_endpoint"]
