"""What outlives a request: answers, conversations, files and batches, by tenant, in a place that several routers may share.

Knows no request, no API and no gRPC: it keeps records of bytes.
"""
