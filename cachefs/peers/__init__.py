"""Other nodes' caches.

n nodes that read one dataset fetch it n times; with peers, each extent of an object version has an owner, which fetches it
once and serves the others. This room knows the members (`membership`, with `listed` and `etcd` as sources), the owner of
each extent (`ring`) and the state of each peer (`health`); it sends requests (`cluster`, `client`) and answers them
(`server`). It does not decide what a reader gets: a peer that does not answer, lies or is gone costs a request to the
origin."""
