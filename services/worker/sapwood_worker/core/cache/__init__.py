"""Which page holds what, in integers: tree, ledger, tiers. No torch, no protobuf; the memory is ``model.pools``."""
