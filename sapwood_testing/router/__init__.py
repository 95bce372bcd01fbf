"""What a router talks to, scripted: a worker, a tokenizer. Real gRPC servers, no model."""
