"""The scheduler process: decides what each step computes and which page holds what. Knows no gRPC and no protobuf."""
