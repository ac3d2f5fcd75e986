"""Mutation testing of cachefs: small faults are put into copies of the package, and the tests must notice them."""
