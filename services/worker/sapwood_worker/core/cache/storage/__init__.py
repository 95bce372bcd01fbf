"""The third tier: pages in a store that workers share and that outlives them. No torch, no protobuf."""
