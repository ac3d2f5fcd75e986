"""cachefs: object storage as plain file paths, through a RAM/SSD block cache on this node.

`docs/explanation/architecture.md` draws the rooms; imports go downwards only, and a test holds that table.
"""

__version__ = "0.1.0"
