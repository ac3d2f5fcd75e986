"""Other nodes' caches.

n nodes that read one dataset fetch it n times; with peers, each extent of an object version has an owner, which fetches it
once and serves the others. This room knows who is there (`membership`), whose an extent is (`ring`) and whether its owner
is worth asking (`health`), and speaks to it (`wire`, `client`, `server`). Nothing here decides what a reader gets: a peer
that does not answer, lies or is gone costs a request to the store.
"""
