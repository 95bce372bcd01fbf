"""The scheduler process: decides what each step computes and which page holds what. No gRPC, no protobuf."""
