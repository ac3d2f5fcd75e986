"""Other nodes' caches.

Without peers, n nodes that read one dataset fetch it n times. With peers, each extent of an object version has an owner,
which fetches it once and serves it to the others. This room knows the members and the owner of each extent (`membership`,
with `listed` and `etcd` as sources of addresses) and the state of each peer (`health`). It sends requests (`cluster`,
`client`) and answers them (`server`). It does not decide what a reader gets: if a peer does not answer, is gone, or sends
wrong bytes, the price is one request to the origin."""
