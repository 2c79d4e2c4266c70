"""Two hosts on one machine: network namespaces with a link of a given latency and bandwidth between them."""
