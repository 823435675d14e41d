"""The collector: what appears on this node's disks, and the node's own facts, as records like any other."""
