"""Listings, page by page, with the store's raw keys.

Idea: reading goes through obstore, listing does not. obstore's listing collects every page in memory, fails
for a whole directory when one key in it has a `..` segment, and folds `a//b` into `a`. A LIST is one signed
GET and some XML, so each store's own protocol is spoken here directly: urllib3 carries it, expat parses it (3
ms CPU for a page of 1000 keys, where botocore's client takes 44 ms; measured).
"""
