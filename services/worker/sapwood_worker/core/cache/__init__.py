"""Which page holds which tokens, in integers: radix tree, page ledger, tiers. No torch, no protobuf; the memory is
``model.pools``."""
